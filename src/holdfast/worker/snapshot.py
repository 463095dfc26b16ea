"""A state in the agent's memory: what `train.report(checkpoint=Checkpoint.from_state(...))` stalls for, one copy.

The agent gives each worker two buffers (`snapshot_buffer`), and is asked before they become larger: their memory is
limited for all workers of the node. A snapshot goes into one that is free while the other may still be on its way to
storage; when both are, the worker waits. A state that has no room twice uses one of them, and one that has no room at
all is written to the staging directory as files, which `session` does when `copy` returns None.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.core.checkpoint_types import MemoryFile, Snapshot
from holdfast.worker.agent_connection import AgentConnection
from holdfast.worker.job import Assignment
from holdfast.worker.snapshot_buffer import HEADER_BYTES, UNSEALED, SnapshotBuffer, new_seal

if TYPE_CHECKING:
    from holdfast.checkpoint.state.plan import Plan

__all__ = ["IN_FLIGHT_MAX", "Snapshots"]

IN_FLIGHT_MAX = 2
_log = logging.getLogger("holdfast")


class _Place:
    """One of the buffers, opened on first use."""

    def __init__(self, path: str, keeps: bool) -> None:
        self.path = path
        self.number = 0
        """The report whose snapshot it holds, of this generation."""
        self.keeps = keeps
        """It holds the checkpoint that this generation started from."""
        self._buffer: SnapshotBuffer | None = None

    @property
    def buffer(self) -> SnapshotBuffer:
        if self._buffer is None:
            self._buffer = SnapshotBuffer.open(self.path)
        return self._buffer

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()


class Snapshots:
    """This worker's buffers."""

    def __init__(self, assignment: Assignment, agent: AgentConnection) -> None:
        kept = {snapshot.buffer for snapshot in assignment.snapshots}
        self._places = [_Place(path, path in kept) for path in assignment.buffers]
        self._limit_bytes = assignment.snapshot_limit_bytes
        self._reserved = (0, 0)
        """How many of the buffers may have which size."""
        self._agent = agent
        self._said = False

    def copy(self, plan: Plan, number: int) -> Snapshot | None:
        """Copy the planned state, for report `number`; waits for room. None if memory has none to give."""
        try:
            usable = self._usable(plan.size_bytes)
            if not usable:
                return self._none(self._why_none(plan.size_bytes))
            self._agent.wait_until(lambda: len(self._agent.pending) < IN_FLIGHT_MAX and any(map(self._is_free, usable)))
            place = min(filter(self._is_free, usable), key=self._worth)
            buffer = place.buffer
            buffer.seal = UNSEALED
            place.keeps, place.number = False, 0
            buffer.reserve(plan.size_bytes)
        except OSError as error:
            return self._none(f"its memory cannot be had ({error.strerror})")
        plan.write_into(buffer.data)
        buffer.seal = seal = new_seal()
        place.number = number
        files = [MemoryFile(file.path, file.offset, file.size) for file in plan.files]
        return Snapshot(buffer=place.path, seal=seal, files=files)

    def close(self) -> None:
        for place in self._places:
            place.close()

    def _usable(self, size_bytes: int) -> list[_Place]:
        """The buffers that may have this size."""
        each = HEADER_BYTES + size_bytes
        count = min(len(self._places), self._limit_bytes // each)
        if count == 0:
            return []
        if count > self._reserved[0] or each > self._reserved[1]:
            self._reserved = (self._agent.reserve_buffers(each, count), each)
            count = self._reserved[0]
        if count == len(self._places):
            return self._places
        if count == 0:
            return []
        first, *others = self._places
        held = [place for place in others if place.buffer.size_bytes]
        if held:
            self._agent.wait_until(lambda: all(map(self._is_free, held)))
            for place in held:
                place.buffer.release()
        return [first]

    def _is_free(self, place: _Place) -> bool:
        return place.number not in self._agent.pending

    def _worth(self, place: _Place) -> int:
        """How bad it were to lose what it holds: a worker that fails next restarts from the newest commit."""
        if place.keeps and not self._agent.committed:
            return 1
        return place.number if place.number and place.number == self._agent.committed else 0

    def _why_none(self, size_bytes: int) -> str:
        if HEADER_BYTES + size_bytes > self._limit_bytes:
            return f"the agent gives each worker {self._limit_bytes >> 20} MiB of memory for that"
        return "the snapshots of other runs and workers have the memory that this node has for that"

    def _none(self, why: str) -> Snapshot | None:
        """Say once why there is no snapshot."""
        if not self._said:
            self._said = True
            _log.warning(
                "Checkpoints of this state are written as files before report() returns, since %s: raise "
                "HOLDFAST_SNAPSHOT_LIMIT_BYTES, or use a machine with more memory.",
                why,
            )
        return None

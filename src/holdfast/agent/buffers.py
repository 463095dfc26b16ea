"""The node's snapshots: shared memory that the agent owns, and what of it is committed under which name.

Two buffers for each worker slot, made when workers are first assigned to it and kept, warm, across generations. The
agent holds the only lasting reference: when it ends, however it ends, the kernel frees them. What a buffer holds is
known by its seal (`worker.snapshot_buffer`); workers write (`worker.snapshot`), `parts` has the files uploaded from
here, and workers of a later generation read them back (`worker.memory_checkpoint`).
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

from holdfast.core.checkpoint_types import Snapshot
from holdfast.core.events import Ticket
from holdfast.errors import CheckpointError, ConfigError
from holdfast.linux.memory import available_bytes
from holdfast.worker.snapshot_buffer import HEADER_BYTES, SnapshotBuffer, grow, make_memory, prefault

__all__ = ["Buffers", "limit_from_environment", "warm_up"]

_BUFFERS_PER_SLOT = 2
_LIMIT_VARIABLE = "HOLDFAST_SNAPSHOT_LIMIT_BYTES"


@dataclass(slots=True)
class _Buffer:
    fd: int
    memory: SnapshotBuffer
    ticket: Ticket | None = None
    """What is on its way to storage from here."""
    snapshot: Snapshot | None = None
    name: str | None = None
    """The checkpoint that `snapshot` is a part of, once it is committed."""


class Buffers:
    """All buffers of one agent. Used from its event loop; the views that it gives out may be read in threads."""

    def __init__(self, slots: int, limit_bytes: int | None = None) -> None:
        if limit_bytes is None:
            limit_bytes = limit_from_environment()
        self.limit_bytes = limit_bytes // max(1, slots)
        """How large the buffers of one slot may be in all."""
        self._slots: dict[int, list[str]] = {}
        self._buffers: dict[str, _Buffer] = {}

    def of_slot(self, slot: int) -> list[str]:
        """The paths of a slot's buffers, for the worker that is about to start there.

        One that is still on its way to storage is replaced by a new one: nobody would tell the worker when it is free.
        """
        paths = self._slots.setdefault(slot, [])
        while len(paths) < _BUFFERS_PER_SLOT:
            paths.append(self._make(slot))
        for at, path in enumerate(paths):
            if self._buffers[path].ticket is not None:
                paths[at] = self._make(slot)
        return list(paths)

    def hold(self, ticket: Ticket, snapshot: Snapshot) -> None:
        """A worker reported a snapshot: it stays as it is until it is released."""
        buffer = self._buffers.get(snapshot.buffer)
        if buffer is None:
            raise CheckpointError(f"{snapshot.buffer} is no buffer of this agent.")
        buffer.ticket, buffer.snapshot, buffer.name = ticket, snapshot, None

    def files(self, snapshot: Snapshot) -> dict[str, memoryview]:
        """The files of a snapshot, as views of the memory."""
        data = self._buffers[snapshot.buffer].memory.data.toreadonly()
        found = {file.path: data[file.offset : file.offset + file.size_bytes] for file in snapshot.files}
        if any(found[file.path].nbytes != file.size_bytes for file in snapshot.files):
            raise CheckpointError("A snapshot reaches beyond its buffer: its worker broke it.")
        return found

    def is_intact(self, snapshot: Snapshot) -> bool:
        """Whether nobody has written to it since it was reported."""
        buffer = self._buffers.get(snapshot.buffer)
        return buffer is not None and buffer.memory.seal == snapshot.seal

    def release(self, ticket: Ticket, name: str | None) -> None:
        """The checkpoint of this ticket is committed under `name`, or (None) given up."""
        current = {path for paths in self._slots.values() for path in paths}
        for path, buffer in list(self._buffers.items()):
            if buffer.ticket == ticket:
                buffer.ticket, buffer.name = None, name
                if path not in current:
                    self._close(path)

    def snapshots(self, name: str | None) -> list[Snapshot]:
        """The snapshots of the committed checkpoint `name` that are intact in this node's memory."""
        return [
            buffer.snapshot
            for buffer in self._buffers.values()
            if name is not None and buffer.name == name and buffer.snapshot is not None
            if self.is_intact(buffer.snapshot)
        ]

    def to_warm_up(self, snapshot: Snapshot) -> tuple[int, int] | None:
        """The buffer beside this snapshot's, if the next one will go there and it is smaller: a descriptor, to be
        closed by `warm_up`, and the size."""
        size_bytes = self._buffers[snapshot.buffer].memory.size_bytes
        if (HEADER_BYTES + size_bytes) * _BUFFERS_PER_SLOT > self.limit_bytes:
            return None
        for paths in self._slots.values():
            for path in paths:
                if snapshot.buffer in paths and path != snapshot.buffer:
                    beside = self._buffers[path]
                    if beside.memory.size_bytes < size_bytes:
                        return os.dup(beside.fd), HEADER_BYTES + size_bytes
        return None

    def close(self) -> None:
        for path in list(self._buffers):
            self._close(path)
        self._slots.clear()

    def _make(self, slot: int) -> str:
        fd = make_memory(f"holdfast-snapshot-{slot}")
        path = f"/proc/{os.getpid()}/fd/{fd}"
        self._buffers[path] = _Buffer(fd, SnapshotBuffer(fd, writable=False))
        return path

    def _close(self, path: str) -> None:
        self._buffers.pop(path).memory.close()


def warm_up(fd: int, size_bytes: int) -> None:
    """Get the pages of a buffer before a worker has to wait for them. Nothing in it is changed, should one write to it
    meanwhile. Takes a while; for a thread."""
    try:
        with suppress(OSError):  # no memory: the worker will notice, and make do without
            grow(fd, size_bytes)
            with mmap.mmap(fd, size_bytes) as memory:
                prefault(memory)
    finally:
        os.close(fd)


def limit_from_environment() -> int:
    """How much memory snapshots may take on this node: what the user says, or half of what is free now."""
    text = os.environ.get(_LIMIT_VARIABLE)
    if text is None:
        return available_bytes() // 2
    if not text.isdecimal():
        raise ConfigError(f"{_LIMIT_VARIABLE} must be a whole number of bytes, not {text!r}.")
    return int(text)

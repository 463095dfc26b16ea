"""The node's snapshots: shared memory that the agent owns, and which committed checkpoint it is of.

Two buffers for each worker slot, made when workers are first assigned to it and kept, warm, across generations. The
agent holds the only lasting reference: when it ends, however it ends, the kernel frees them. What a buffer holds is
known by its seal (`worker.snapshot_buffer`); workers write (`worker.snapshot`), `parts` has the files uploaded from
here, and workers of a later generation read them back (`worker.memory_checkpoint`), on other nodes too: what those have
(`snapshot_server`) is fetched into a buffer beside the slots' (`snapshot_fetch`). Each run has buffers of its own; the
memory of all of them is limited in one place, `SnapshotMemory`: a worker asks before it makes a buffer larger.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from holdfast.core.checkpoint_types import Snapshot
from holdfast.core.events import Ticket
from holdfast.errors import CheckpointError, ConfigError, NotFound
from holdfast.linux.memory import available_bytes
from holdfast.worker.snapshot_buffer import HEADER_BYTES, UNSEALED, SnapshotBuffer, make_memory

__all__ = ["Buffers", "SnapshotMemory", "limit_from_environment", "warm_up"]

_BUFFERS_PER_SLOT = 2
_LIMIT_VARIABLE = "HOLDFAST_SNAPSHOT_LIMIT_BYTES"


@dataclass(slots=True)
class _Buffer:
    fd: int
    memory: SnapshotBuffer
    ticket: Ticket | None = None
    """What is on its way to storage from here."""
    snapshot: Snapshot | None = None
    token: str | None = None
    """Of the checkpoint that `snapshot` is a part of, once it is committed: its name may be another one's later."""
    reserved_bytes: int = 0
    """How large it may be."""
    is_filling: bool = False
    """Files are on their way into it from other nodes."""
    is_fetched: bool = False
    """They have come, for the workers that start from that checkpoint: no worker's slot has this buffer."""


class SnapshotMemory:
    """How much memory the snapshots of all runs on this node may take, and how much of it is reserved."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_from_environment() if limit_bytes is None else limit_bytes
        self.reserved_bytes = 0

    def reserve(self, size_bytes: int) -> bool:
        """Reserve so much more, or, where it is negative, give it back; False if there is not enough."""
        if size_bytes > 0 and self.reserved_bytes + size_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += size_bytes
        return True


class Buffers:
    """All buffers of one run on this node. Used from the agent's event loop; the views that it gives out may be read in
    threads."""

    def __init__(self, slots: int, memory: SnapshotMemory) -> None:
        self._memory = memory
        self.limit_bytes = memory.limit_bytes // max(1, slots)
        """How large the buffers of one slot may be in all, so that each of the run's workers gets the same."""
        self._slots: dict[int, list[str]] = {}
        self._buffers: dict[str, _Buffer] = {}
        self._started_from: str | None = None
        """The token of the checkpoint that the workers started from, as long as there is no newer one."""

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

    def free_slots(self, count: int, token: str | None) -> None:
        """The next workers have the first `count` slots: free the others, but for what is on its way to storage, and
        for the checkpoint of this token, which those workers start from, until there is a newer one."""
        for slot in [slot for slot in self._slots if slot >= count]:
            del self._slots[slot]
        self._close_unused(token)

    def reserve(self, slot: int, size_bytes: int, count: int) -> int:
        """The worker of this slot wants `count` buffers of this size: how many it gets, which is all, one or none."""
        granted = self._reserve(slot, size_bytes, count)
        is_short = granted < min(count, self.limit_bytes // max(1, size_bytes))
        if is_short and self._free_fetched():  # whoever reports has loaded what it starts from
            granted = self._reserve(slot, size_bytes, count)
        return granted

    def _reserve(self, slot: int, size_bytes: int, count: int) -> int:
        buffers = [self._buffers[path] for path in self._slots[slot]]
        if count >= len(buffers) and len(buffers) * size_bytes <= self.limit_bytes:
            missing = [max(0, size_bytes - buffer.reserved_bytes) for buffer in buffers]
            if self._memory.reserve(sum(missing)):
                for buffer, more in zip(buffers, missing, strict=True):
                    buffer.reserved_bytes += more
                return len(buffers)
        first, *others = buffers
        returned = sum(buffer.reserved_bytes for buffer in others)
        wanted = max(size_bytes, first.reserved_bytes)
        if size_bytes > self.limit_bytes or not self._memory.reserve(wanted - first.reserved_bytes - returned):
            return 0
        first.reserved_bytes = wanted
        for buffer in others:
            buffer.reserved_bytes = 0
        return 1

    def hold(self, ticket: Ticket, snapshot: Snapshot) -> None:
        """A worker reported a snapshot: it stays as it is until it is released."""
        buffer = self._buffers.get(snapshot.buffer)
        if buffer is None:
            raise CheckpointError(f"{snapshot.buffer} is no buffer of this agent.")
        buffer.ticket, buffer.snapshot, buffer.token = ticket, snapshot, None

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

    def describe_change(self, snapshot: Snapshot) -> str:
        """What has become of a snapshot that is not intact, as a phrase."""
        buffer = self._buffers.get(snapshot.buffer)
        if buffer is None:
            return "its buffer is closed"
        if buffer.memory.seal == UNSEALED:
            return "its buffer is being filled anew"
        if buffer.snapshot == snapshot or buffer.ticket is None:
            return "its buffer has another seal"
        return f"its buffer has the one of report {buffer.ticket.number} of generation {buffer.ticket.generation}"

    def release(self, ticket: Ticket, token: str | None) -> None:
        """The checkpoint of this ticket is committed with this token, or (None) given up."""
        for buffer in self._buffers.values():
            if buffer.ticket == ticket:
                buffer.ticket, buffer.token = None, token
        if token is not None:
            self._started_from = None
        self._close_unused(self._started_from)

    def snapshots(self, token: str | None) -> list[Snapshot]:
        """The snapshots of the committed checkpoint of this token that are intact in this node's memory."""
        return [
            buffer.snapshot
            for buffer in self._buffers.values()
            if token is not None and buffer.token == token and buffer.snapshot is not None
            if self.is_intact(buffer.snapshot)
        ]

    def stored_files(self, token: str) -> dict[str, int]:
        """The sizes of the files that `snapshots` has of this checkpoint."""
        return {file.path: file.size_bytes for snapshot in self.snapshots(token) for file in snapshot.files}

    def open_file(self, token: str, path: str) -> tuple[int, int, int, int]:
        """One of these files, for another node: a descriptor, to be closed, where the file begins there and its size,
        and the seal that the buffer must have before and after it is read (`snapshot_buffer.read_seal`)."""
        for snapshot in self.snapshots(token):
            for file in snapshot.files:
                if file.path == path and self.files(snapshot):
                    fd = os.open(snapshot.buffer, os.O_RDONLY | os.O_CLOEXEC)
                    return fd, HEADER_BYTES + file.offset, file.size_bytes, snapshot.seal
        raise NotFound(f"{path} of checkpoint {token} is not in the memory of this node.")

    def make_room(self, size_bytes: int) -> str | None:
        """The path of a buffer for so many bytes that are about to be fetched from other nodes; None if there is no
        memory for it. It is given back by `drop`, or used by `hold_fetched`."""
        path = self._make("fetched")
        if not self._memory.reserve(HEADER_BYTES + size_bytes):
            self._close(path)
            return None
        self._buffers[path].reserved_bytes = HEADER_BYTES + size_bytes
        self._buffers[path].is_filling = True
        return path

    def hold_fetched(self, snapshot: Snapshot, token: str) -> None:
        """Files of the committed checkpoint of this token were fetched: they stay until there is a newer one, or a
        worker needs the memory."""
        buffer = self._buffers.get(snapshot.buffer)
        if buffer is not None:
            buffer.snapshot, buffer.token = snapshot, token
            buffer.is_filling, buffer.is_fetched = False, True

    def drop(self, path: str) -> None:
        """Nothing was fetched into this buffer."""
        if path in self._buffers:
            self._close(path)

    def to_warm_up(self, snapshot: Snapshot) -> tuple[SnapshotBuffer, int] | None:
        """The buffer beside this snapshot's, if the next one will go there and it is smaller, and the size: for
        `warm_up`."""
        size_bytes = self._buffers[snapshot.buffer].memory.size_bytes
        for paths in self._slots.values():
            for path in paths:
                if snapshot.buffer in paths and path != snapshot.buffer:
                    beside = self._buffers[path]
                    if beside.memory.size_bytes < size_bytes <= beside.reserved_bytes - HEADER_BYTES:
                        return SnapshotBuffer(os.dup(beside.fd)), size_bytes
        return None

    def close(self) -> None:
        for path in list(self._buffers):
            self._close(path)
        self._slots.clear()

    def _make(self, purpose: int | str) -> str:
        fd = make_memory(f"holdfast-snapshot-{purpose}")
        path = f"/proc/{os.getpid()}/fd/{fd}"
        self._buffers[path] = _Buffer(fd, SnapshotBuffer(fd, writable=False))
        return path

    def _free_fetched(self) -> bool:
        """Give back what was fetched; False if nothing was."""
        fetched = [path for path, buffer in self._buffers.items() if buffer.is_fetched]
        for path in fetched:
            self._close(path)
        return bool(fetched)

    def _close_unused(self, token: str | None) -> None:
        """Close the buffers that no slot has and nobody needs: not uploaded, not of the checkpoint of this token."""
        self._started_from = token
        current = {path for paths in self._slots.values() for path in paths}
        for path, buffer in list(self._buffers.items()):
            is_busy = buffer.ticket is not None or buffer.is_filling
            needed = is_busy or (buffer.token is not None and buffer.token == token)
            if path not in current and not needed:
                self._close(path)

    def _close(self, path: str) -> None:
        buffer = self._buffers.pop(path)
        buffer.memory.close()
        self._memory.reserve(-buffer.reserved_bytes)


def warm_up(buffer: SnapshotBuffer, size_bytes: int) -> None:
    """Get the pages of a buffer before a worker has to wait for them, and close it. Nothing in it is changed, should
    one write to it meanwhile. Takes a while; for a thread."""
    try:
        with suppress(OSError):  # no memory: the worker will notice, and make do without
            buffer.reserve(size_bytes)
    finally:
        buffer.close()


def limit_from_environment() -> int:
    """How much memory snapshots may take on this node: what the user says, or half of what is free now."""
    text = os.environ.get(_LIMIT_VARIABLE)
    if text is None:
        return available_bytes() // 2
    if not text.isdecimal():
        raise ConfigError(f"{_LIMIT_VARIABLE} must be a whole number of bytes, not {text!r}.")
    return int(text)

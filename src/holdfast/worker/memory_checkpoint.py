"""Loading a checkpoint from the node's memory, if it is still there from before a restart.

The agent tells a new worker, in its assignment, which buffers hold the very checkpoint that it is to resume from, and
under which seals (`snapshot_buffer`). Any rank may read any of them. A seal that is not as told, or is not any more
after reading, means that the buffer has been used again meanwhile: then storage is read, as it is by everybody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.digest import mismatch
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.known_files import process_wide
from holdfast.checkpoint.state.load import load_state
from holdfast.core.checkpoint_types import Snapshot
from holdfast.errors import Damaged, NotFound
from holdfast.worker.snapshot_buffer import SnapshotBuffer

__all__ = ["MemoryCheckpoint"]


class _Elsewhere(Exception):
    """A file of the checkpoint is not in this node's memory."""


class MemoryCheckpoint(Checkpoint):
    """A committed checkpoint, in all like any other, that is loaded from memory where possible."""

    def __init__(self, stored: Checkpoint, snapshots: Sequence[Snapshot]) -> None:
        super().__init__(stored._given, stored._custom)
        self._opened = stored._opened
        self._snapshots = snapshots

    def load_state(self, map_location: Any = None, into: Any = None) -> Any:
        try:
            memory = _Memory(self._snapshots)
        except OSError:
            return super().load_state(map_location, into)
        try:
            if memory.is_intact():
                state = load_state(lambda name: self._open_file(memory, name), map_location, into)
                if memory.is_intact():
                    return state
        except (_Elsewhere, Damaged, NotFound):
            pass  # storage has the last word, also on damage: a buffer may have been written to while it was read
        finally:
            memory.close()
        return super().load_state(map_location, into)

    def _open_file(self, memory: _Memory, name: str) -> memoryview | Path:
        found = memory.files.get(name)
        if found is not None:
            return found
        directory = self._open().local_root
        if directory is None:
            raise _Elsewhere(name)
        self._require_file(name)  # another node's part
        return directory / name

    def _require_file(self, name: str) -> None:
        """Raise `Damaged` unless this file of the stored checkpoint is what its manifest says."""
        store = self._open()
        manifest = self._manifest(store)
        entries = () if manifest is None else manifest.files
        for entry in entries:
            if entry.path == name and mismatch(entry, process_wide.read_digest(store, name)) is not None:
                raise Damaged(f"{store.uri}: {name} is damaged.", checkpoint=store.uri)


class _Memory:
    """The snapshots of one checkpoint, mapped."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self.files: dict[str, memoryview] = {}
        self._sealed: list[tuple[SnapshotBuffer, int]] = []
        try:
            for snapshot in snapshots:
                buffer = SnapshotBuffer.open(snapshot.buffer, writable=False)
                self._sealed.append((buffer, snapshot.seal))
                data = buffer.data
                for file in snapshot.files:
                    self.files[file.path] = data[file.offset : file.offset + file.size_bytes]
        except OSError:
            self.close()
            raise

    def is_intact(self) -> bool:
        return all(buffer.seal == seal for buffer, seal in self._sealed)

    def close(self) -> None:
        self.files.clear()
        for buffer, _ in self._sealed:
            buffer.close()

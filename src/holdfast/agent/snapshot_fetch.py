"""Brings what this node lacks of a checkpoint into its memory, from other nodes that have it in theirs.

Once a node, before its workers start, where nodes do not share the run's storage: each file comes from the first
neighbour that has it and gives the very bytes of the manifest in time, otherwise from storage. Only states are fetched:
the files of a reported directory are in nobody's memory. If anything is missing in the end, nothing is kept, and the
workers read storage as they would have done anyway.
"""

from __future__ import annotations

import functools
import mmap
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.digest import mismatch
from holdfast.checkpoint.state.skeleton import FILE
from holdfast.core.checkpoint_types import FileEntry, MemoryFile
from holdfast.errors import CheckpointError, Damaged, HoldfastError, NotFound, Unavailable
from holdfast.runtime import current
from holdfast.storage.hashing import BLOCK_BYTES, digest_memory, new_hasher
from holdfast.storage.store import Digest, Entry, Store

__all__ = ["NeighbourMemory", "SnapshotFetch"]

_THREADS = 4
_PATIENCE_S = 20.0
_SLOWEST_BYTES_PER_S = 4 * 1024 * 1024
"""So long all neighbours together may take to answer, and so long beyond this rate to give what they have."""


class NeighbourMemory(Protocol):
    """What another node has in memory of one checkpoint. Raises `HoldfastError`."""

    def list(self) -> list[Entry]:
        """The files that it has."""
        ...

    def read_into(self, key: str, target: memoryview, on_block: Callable[[memoryview], None]) -> None:
        """Fill memory of the file's size with it, and show each block of it that has come."""
        ...

    def close(self) -> None: ...


class SnapshotFetch:
    """One fetch. `look` and `read_into` block, and are called one after the other."""

    def __init__(self, name: str, token: str, neighbours: Mapping[str, NeighbourMemory]) -> None:
        """`name` and `token` are the checkpoint's; the neighbours, by name, are asked in this order."""
        self._name = name
        self._token = token
        self._neighbours = neighbours
        self._missing: list[FileEntry] = []
        self._files: dict[str, set[str]] = {}
        """What each neighbour has, of those that were asked."""
        self._lock = threading.Lock()
        self._left: set[str] = set()
        """Neighbours that cannot be reached, or are too slow: nothing more is asked of them."""
        self._is_cancelled = False
        self._deadline = 0.0
        self.store: Store | None = None
        self.problems: dict[str, str] = {}
        """What went wrong first with each neighbour, as a sentence."""
        self.sources: dict[str, int] = {}
        """How many bytes came from each neighbour, and from storage ("")."""

    @property
    def summary(self) -> str:
        """Where everything came from, as a sentence."""
        sources = sorted(self.sources.items(), reverse=True)
        shares = [f"{size_bytes / 1e6:.1f} MB from {name or 'storage'}" for name, size_bytes in sources]
        return f"{self._name} is in memory here: {', '.join(shares)}."

    def cancel(self) -> None:
        """Let what is under way stop at its next block."""
        self._is_cancelled = True

    def close(self) -> None:
        for memory in self._neighbours.values():
            memory.close()

    def look(self, store: Store, have: Collection[str]) -> int:
        """How large the files are that this node lacks, if neighbours have any of them; otherwise 0. `have` are the
        paths of those that it has."""
        self.store = store
        manifest = Catalog(store).get(self._name)
        entries = {entry.path: entry for entry in manifest.files}
        if manifest.token != self._token or FILE not in entries:
            return 0
        self._missing = [entry for path, entry in entries.items() if path not in have]
        wanted = {entry.path for entry in self._missing}
        found: set[str] = set()
        self._deadline = current().monotonic() + _PATIENCE_S
        for neighbour in self._neighbours:
            if wanted <= found:
                break
            found |= self._files_of(neighbour)
        return sum(_aligned(entry.size_bytes) for entry in self._missing) if wanted & found else 0

    def read_into(self, memory: memoryview) -> list[MemoryFile]:
        """Fill memory of the size that `look` gave. Raises `HoldfastError` if a file is nowhere as it should be."""
        placed: list[tuple[FileEntry, int]] = []
        offset = 0
        for entry in self._missing:
            placed.append((entry, offset))
            offset += _aligned(entry.size_bytes)
        self._deadline = current().monotonic() + _PATIENCE_S + offset / _SLOWEST_BYTES_PER_S
        largest_first = sorted(placed, key=lambda one: one[0].size_bytes, reverse=True)
        current().map_in_threads(functools.partial(self._read, memory), largest_first, _THREADS)
        return [MemoryFile(entry.path, start, entry.size_bytes) for entry, start in placed]

    def _read(self, memory: memoryview, placed: tuple[FileEntry, int]) -> None:
        entry, start = placed
        target = memory[start : start + entry.size_bytes]
        for neighbour in self._neighbours:
            if entry.path in self._files_of(neighbour) and self._read_from(neighbour, entry, target):
                self._count(neighbour, entry)
                return
        self._read_stored(entry, target)
        self._count("", entry)

    def _read_from(self, neighbour: str, entry: FileEntry, target: memoryview) -> bool:
        """Whether the neighbour gave the file as it was committed. One that gave another may have others."""
        hasher = new_hasher()

        def on_block(block: memoryview) -> None:
            self._check_time()
            hasher.update(block)  # while the CPU's caches have it

        try:
            self._neighbours[neighbour].read_into(entry.path, target, on_block)
        except HoldfastError as error:
            self._check_cancelled()
            self._note(neighbour, str(error))
            if not isinstance(error, NotFound):
                self._left.add(neighbour)
            return False
        problem = mismatch(entry, Digest(len(target), hasher.hexdigest()))
        if problem is not None:
            self._note(neighbour, problem)
        return problem is None

    def _files_of(self, neighbour: str) -> set[str]:
        """What a neighbour has; nothing if it has failed. It is asked when it is needed first."""
        if neighbour not in self._files and neighbour not in self._left:
            try:
                self._check_time()
                self._files[neighbour] = {entry.key for entry in self._neighbours[neighbour].list()}
            except HoldfastError as error:
                self._note(neighbour, str(error))
                self._left.add(neighbour)
        return set() if neighbour in self._left else self._files[neighbour]

    def _read_stored(self, entry: FileEntry, target: memoryview) -> None:
        assert self.store is not None
        key = layout.key_of(self._name, entry.path)
        for start in range(0, entry.size_bytes, BLOCK_BYTES):
            self._check_cancelled()
            block = self.store.get_range(key, start, min(BLOCK_BYTES, entry.size_bytes - start))
            target[start : start + len(block)] = block
        if (problem := mismatch(entry, digest_memory(target))) is not None:
            raise Damaged(f"{self.store.uri}: {self._name} is damaged: {problem}.")

    def _check_time(self) -> None:
        self._check_cancelled()
        if current().monotonic() > self._deadline:
            raise Unavailable("It took too long.")

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise CheckpointError(f"What was being fetched of {self._name} is not needed any more.")

    def _count(self, source: str, entry: FileEntry) -> None:
        with self._lock:
            self.sources[source] = self.sources.get(source, 0) + entry.size_bytes

    def _note(self, neighbour: str, problem: str) -> None:
        """Once for each neighbour."""
        with self._lock:
            self.problems.setdefault(neighbour, f"{neighbour} could not give what it has of {self._name}: {problem}")


def _aligned(size_bytes: int) -> int:
    """Tensors of a file that begins at a page are aligned."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

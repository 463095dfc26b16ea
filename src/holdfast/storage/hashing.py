"""Hash bytes while they are transferred, in one pass.

Every backend's upload takes its bytes from `blocks`, mostly by way of `HashingSource`, so that the digest is of the
very bytes that were sent, even if somebody writes to the file meanwhile. `digest_file` and `digest_memory` only hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from holdfast.storage.hugepages import fill
from holdfast.storage.store import Digest, Incoming, InMemory, OnBytes, Source

__all__ = [
    "BLOCK_BYTES",
    "HashingSource",
    "blocks",
    "digest_file",
    "digest_memory",
    "new_hasher",
    "sample_memory",
    "size_of",
]

BLOCK_BYTES = 8 * 1024 * 1024
_DIGEST_BYTES = 256 * 1024
_SAMPLES = 64
_SAMPLE_BYTES = 4096

_Buffer = Callable[[], memoryview]
"""Returns the memory for the next block."""


def new_hasher() -> blake3:
    """A BLAKE3 hasher of one thread: that is faster than disks, and several files are hashed at once anyway."""
    return blake3()


def size_of(source: Source | Incoming) -> int:
    """The size in bytes; `OSError` if the file is missing."""
    if isinstance(source, Path):
        return source.stat().st_size
    return source.view.nbytes if isinstance(source, InMemory) else source.size_bytes


class HashingSource:
    """The blocks of a file or of memory, hashed and counted as they are read."""

    def __init__(
        self, source: Source | Incoming, on_bytes: OnBytes | None, block_bytes: int, buffer: _Buffer | None = None
    ) -> None:
        self._size_bytes = 0
        self._known = source.digest if isinstance(source, InMemory) else None
        self._hasher = new_hasher()
        size_of(source)  # a missing source fails before anything is made in the store
        self._blocks = blocks(source, None if self._known else self._hasher, on_bytes, block_bytes, buffer)

    def __iter__(self) -> Iterator[memoryview]:
        for block in self._blocks:
            self._size_bytes += len(block)
            yield block

    def digest(self) -> Digest:
        """The digest of all blocks so far, or the one that was known beforehand."""
        return self._known or Digest(self._size_bytes, self._hasher.hexdigest())


def blocks(
    source: Source | Incoming,
    hasher: blake3 | None,
    on_bytes: OnBytes | None = None,
    block_bytes: int = BLOCK_BYTES,
    buffer: _Buffer | None = None,
) -> Iterator[memoryview]:
    """The bytes in blocks of `block_bytes` (the last may be shorter), hashed as they are read.

    Without `buffer`, a file's blocks are new memory that the caller may keep, and blocks of memory are views of it.
    With it, each block is written to the memory that `buffer()` returns, whose length is the block's size.
    """
    if isinstance(source, InMemory):
        found = _slices(source.view.cast("B"), block_bytes, buffer)
    else:
        target = buffer or (lambda: memoryview(bytearray(block_bytes)))
        found = _fill(source.readinto, target) if isinstance(source, Incoming) else _reads(source, target)
    for block in found:
        if hasher is not None:
            hasher.update(block)
        if on_bytes is not None:
            on_bytes(len(block))
        yield block


def _reads(source: Path, buffer: _Buffer) -> Iterator[memoryview]:
    with source.open("rb", buffering=0) as file:
        yield from _fill(file.readinto, buffer)


def _fill(readinto: Callable[[memoryview], int | None], buffer: _Buffer) -> Iterator[memoryview]:
    while True:
        target = buffer()
        filled = 0
        # A short read is not the end of the file; blocks stay full so that O_DIRECT and multipart sizes hold.
        while filled < len(target) and (count := readinto(target[filled:])):
            filled += count
        if filled:
            yield target[:filled]
        if filled < len(target):
            return


def _slices(view: memoryview, block_bytes: int, buffer: _Buffer | None) -> Iterator[memoryview]:
    start = 0
    while start < len(view):
        if buffer is None:
            block = view[start : start + block_bytes]
        else:
            target = buffer()
            block = target[: len(view) - start]
            fill(block, view[start : start + len(block)])
        yield block
        start += len(block)


def digest_memory(view: memoryview, on_block: OnBytes | None = None) -> Digest:
    """Size and BLAKE3 of memory; `on_block` may raise to abandon it."""
    hasher = new_hasher()
    size_bytes = sum(len(block) for block in blocks(InMemory(view), hasher, on_block))
    return Digest(size_bytes, hasher.hexdigest())


def sample_memory(view: memoryview) -> str:
    """A hash of a few pages spread over the memory: if it differs, so does the whole; if not, the whole still may."""
    view = view.cast("B")
    hasher = new_hasher()
    step = max(_SAMPLE_BYTES, view.nbytes // _SAMPLES)
    for start in range(0, view.nbytes, step):
        hasher.update(view[start : start + _SAMPLE_BYTES])
    return hasher.hexdigest()


def digest_file(path: Path) -> Digest:
    """Size and BLAKE3 of a local file.

    Read into a buffer that stays in the processor's cache, not mapped: a mapped file that shrinks, or whose network
    mount fails, kills the process by SIGBUS. Costs the same wall time as two threads over a map where cores are busy.
    """
    hasher = new_hasher()
    one = memoryview(bytearray(_DIGEST_BYTES))
    size_bytes = sum(len(block) for block in blocks(path, hasher, buffer=lambda: one))
    return Digest(size_bytes, hasher.hexdigest())

"""One read of a local file serves both the digest and the transfer.

Every backend's upload takes its bytes from `blocks`, so that the digest is of the very bytes that were sent, even if
somebody writes to the file meanwhile. `digest_file` is for what is only to be checked. Neighbours: `posix`, `objects`
and `arrow` send the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from holdfast.storage.store import Digest, OnBytes

__all__ = ["BLOCK_BYTES", "blocks", "digest_file", "new_hasher"]

BLOCK_BYTES = 8 * 1024 * 1024
_DIGEST_BYTES = 256 * 1024


def new_hasher() -> blake3:
    """An empty hasher. One thread each: it outruns the disks, and several files go at once anyway."""
    return blake3()


def blocks(
    source: Path,
    hasher: blake3,
    on_bytes: OnBytes | None = None,
    block_bytes: int = BLOCK_BYTES,
    buffer: Callable[[], memoryview] | None = None,
) -> Iterator[memoryview]:
    """The file's bytes in blocks of `block_bytes` (the last may be shorter; an empty file has none), hashed as they go.

    Each block is memory of its own, which the consumer may keep, unless `buffer` says where to read to: it is called
    before each read, and what it returns fixes the block's size.
    """
    allocate = buffer or (lambda: memoryview(bytearray(block_bytes)))
    with source.open("rb", buffering=0) as file:
        while True:
            room = allocate()
            filled = 0
            # A short read is not the end of the file; blocks stay full so that O_DIRECT and multipart sizes hold.
            while filled < len(room) and (count := file.readinto(room[filled:])):
                filled += count
            if not filled:
                return
            block = room[:filled]
            hasher.update(block)
            if on_bytes is not None:
                on_bytes(filled)
            yield block
            if filled < len(room):
                return


def digest_file(path: Path) -> Digest:
    """Size and BLAKE3 of a local file.

    Read into a buffer that stays in the processor's cache, not mapped: a mapped file that shrinks, or whose network
    mount fails, kills the process by SIGBUS. Costs the same wall time as two threads over a map where cores are busy.
    """
    hasher = new_hasher()
    one = memoryview(bytearray(_DIGEST_BYTES))
    size_bytes = sum(len(block) for block in blocks(path, hasher, buffer=lambda: one))
    return Digest(size_bytes, hasher.hexdigest())

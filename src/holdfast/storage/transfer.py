"""Bulk bytes to local files as fast as the disk takes them, hashed on the way.

One thread reads and hashes, another writes; past the page cache (O_DIRECT) where the filesystem lets us, which beats
`cp` and fsync on the disks we measured. A file goes through a ring of page-aligned buffers; memory is written from
where it lies. Preallocation gained nothing there, and glibc emulates it by writing every block where it is not
supported, so there is none. Neighbours: `hashing` reads, `posix` chooses the files, `objects` and `arrow` receive.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from holdfast.errors import Unavailable
from holdfast.storage.failures import translated
from holdfast.storage.files import landing, write_all
from holdfast.storage.hashing import Sent, blocks, new_hasher, size_of
from holdfast.storage.store import Digest, InMemory, OnBytes, Source

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["pump", "receive"]

_BLOCK_BYTES = 1024 * 1024
_CACHED_BLOCK_BYTES = 256 * 1024
_MEMORY_BLOCK_BYTES = 4 * 1024 * 1024
_RING = 4


def pump(source: Source, fd: int, target: Path, on_bytes: OnBytes | None, direct: bool = False) -> Digest:
    """Write `source` to `fd`, which is empty and at its start.

    What the writing says is translated for `target`; what the reading says is left as it is. `direct` asks for
    O_DIRECT: good for what must be durable, bad for what is read again at once.
    """
    large = size_of(source) >= _BLOCK_BYTES
    if large and direct:
        _set_direct(fd, True)
    if large and isinstance(source, Path):
        return (_pump_file if direct else _pump_cached)(source, fd, target, on_bytes)
    sent = Sent(source, on_bytes, _MEMORY_BLOCK_BYTES)
    if large and isinstance(source, InMemory) and source.digest is None:
        with _Writer(fd, target) as writer:
            for block in sent:
                writer.lay(block)
    else:  # nothing to hash meanwhile, or hardly anything
        for block in sent:
            with translated(target):
                _write_block(fd, block)
    return sent.digest()


def receive(
    incoming: Iterable[bytes | memoryview], target: Path, size_bytes: int, shown: str, on_bytes: OnBytes | None
) -> Digest:
    """Write what arrives from elsewhere to `target`, which is there whole or not at all; `shown` is where it comes
    from, and `size_bytes` how much there must be."""
    hasher, got_bytes = new_hasher(), 0
    with landing(target) as file:
        for block in incoming:
            hasher.update(block)
            with translated(target):
                write_all(file.fileno(), block)
            got_bytes += len(block)
            if on_bytes is not None:
                on_bytes(len(block))
        if got_bytes != size_bytes:
            raise Unavailable(f"{shown} broke off after {got_bytes} of {size_bytes} bytes: try again.")
    return Digest(got_bytes, hasher.hexdigest())


def _pump_cached(source: Path, fd: int, target: Path, on_bytes: OnBytes | None) -> Digest:
    """Into the page cache one thread is enough: a block is still in the processor's cache when it is written."""
    hasher, sent_bytes = new_hasher(), 0
    one = memoryview(bytearray(_CACHED_BLOCK_BYTES))
    for block in blocks(source, hasher, on_bytes, buffer=lambda: one):
        with translated(target):
            write_all(fd, block)
        sent_bytes += len(block)
    return Digest(sent_bytes, hasher.hexdigest())


def _pump_file(source: Path, fd: int, target: Path, on_bytes: OnBytes | None) -> Digest:
    hasher, sent_bytes = new_hasher(), 0
    ring = [memoryview(mmap.mmap(-1, _BLOCK_BYTES)) for _ in range(_RING)]
    with _Writer(fd, target) as writer:

        def next_buffer() -> memoryview:
            writer.make_room()
            return ring[writer.count % _RING]

        for block in blocks(source, hasher, on_bytes, buffer=next_buffer):
            writer.lay(block)
            sent_bytes += len(block)
    return Digest(sent_bytes, hasher.hexdigest())


class _Writer:
    """Writes blocks, in order, in a thread of its own; at most a ring of them waits."""

    def __init__(self, fd: int, target: Path) -> None:
        from concurrent.futures import ThreadPoolExecutor  # slow to import: it brings logging

        self._fd = fd
        self._target = target
        self._pending: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-write")
        self.count = 0

    def make_room(self) -> None:
        """Wait until the block that was laid a whole ring ago is written."""
        if len(self._pending) == _RING:
            with translated(self._target):
                self._pending.popleft().result()

    def lay(self, block: memoryview) -> None:
        self.make_room()
        self._pending.append(self._thread.submit(_write_block, self._fd, block))
        self.count += 1

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=error is not None)
        if error is None:
            with translated(self._target):
                for write in self._pending:
                    write.result()


def _write_block(fd: int, block: memoryview) -> None:
    whole = len(block) // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        write_all(fd, block[:whole])
    except OSError as error:
        if error.errno != errno.EINVAL or not _set_direct(fd, False):
            raise
        write_all(fd, block[:whole])  # a filesystem that took the flag and refuses the write
    if whole < len(block):
        _set_direct(fd, False)  # the end of the file: O_DIRECT takes whole pages only
        write_all(fd, block[whole:])


def _set_direct(fd: int, wanted: bool) -> bool:
    """Switch O_DIRECT on or off; False if it already was so, or the filesystem has no such thing."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) == wanted:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError:
        return False
    return True

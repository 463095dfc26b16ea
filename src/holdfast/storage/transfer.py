"""Write large files to local disks at the speed of the disk, and hash them on the way.

One thread reads and hashes, another writes: past the page cache (O_DIRECT) where the filesystem allows it, which was
faster than `cp` and fsync on the disks we measured, and from huge pages (`hugepages`), into which files are read and
memory is copied. Preallocation gained nothing there, and glibc emulates it by writing every block where it is not
supported, so there is none. `hashing` reads the blocks; `posix` writes files with `write_stream`; `objects` and `arrow`
download with `receive`.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast.errors import Unavailable
from holdfast.storage import hugepages
from holdfast.storage.failures import translated
from holdfast.storage.files import atomic_download, write_all
from holdfast.storage.hashing import HashingSource, new_hasher, size_of
from holdfast.storage.store import Digest, Incoming, InMemory, OnBytes, Source

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["write_stream", "receive"]

_CACHED_BLOCK_BYTES = 256 * 1024
_LARGE_BYTES = 1024 * 1024
"""Direct I/O pays for files of at least this size."""
_RING = 2
"""One buffer is filled while the other is written."""
_AT_ONCE = max(2, min(4, len(os.sched_getaffinity(0)) // 2))
"""Files written at the same time: two keep a disk busy, and on few cores more threads would compete with training."""


def write_stream(
    source: Source | Incoming, fd: int, target: Path, on_bytes: OnBytes | None, direct: bool = False
) -> Digest:
    """Write `source` to the empty file `fd`.

    Errors of writing are translated for `target`; errors of reading are not. `direct` asks for O_DIRECT: good for what
    must be durable, bad for what is read again at once.
    """
    size_bytes = size_of(source)
    if direct and size_bytes >= _LARGE_BYTES:
        return _write_direct(source, fd, target, on_bytes)
    one = memoryview(bytearray(_CACHED_BLOCK_BYTES))  # stays in the processor's cache
    sent = HashingSource(source, on_bytes, _CACHED_BLOCK_BYTES, None if isinstance(source, InMemory) else lambda: one)
    for block in sent:
        with translated(target):
            write_all(fd, block)
    return sent.digest()


def receive(
    incoming: Iterable[bytes | memoryview], target: Path, size_bytes: int, shown: str, on_bytes: OnBytes | None
) -> Digest:
    """Download the blocks `incoming` to `target`, which appears whole or not at all. `size_bytes` is the size that it
    must have, `shown` names the source in errors."""
    hasher, got_bytes = new_hasher(), 0
    with atomic_download(target) as file:
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


def _write_direct(source: Source | Incoming, fd: int, target: Path, on_bytes: OnBytes | None) -> Digest:
    _watch_forks()
    _set_direct(fd, True)
    # A sender on another machine that stalls must not keep others from their turn.
    turn: AbstractContextManager[object] = nullcontext() if isinstance(source, Incoming) else _turns
    with turn, hugepages.borrow_buffers(_RING) as ring, _Writer(fd, target, ring) as writer:
        sent = HashingSource(source, on_bytes, hugepages.BUFFER_BYTES, writer.next_buffer)
        for block in sent:
            writer.submit(block)
    return sent.digest()


class _WriterThread(threading.local):
    """One writer thread for each thread that uploads; ends with it. A new thread for each file would cost more: the
    kernel starts threads on a core that trains as readily as on an idle one."""

    thread: ThreadPoolExecutor | None = None


_writer_thread = _WriterThread()
_turns = threading.Semaphore(_AT_ONCE)


def _reset_after_fork() -> None:
    """The parent's threads do not exist in the child, and will not release what they held."""
    global _turns
    _writer_thread.thread = None
    _turns = threading.Semaphore(_AT_ONCE)


@functools.cache
def _watch_forks() -> None:
    """Called before there is anything to reset: most workers never write directly, and a hook that is in Python costs
    each of them copies of the pages that it looks at."""
    os.register_at_fork(after_in_child=_reset_after_fork)


class _Writer:
    """Writes blocks, in order, from a ring of buffers, in another thread."""

    def __init__(self, fd: int, target: Path, ring: Sequence[memoryview]) -> None:
        if _writer_thread.thread is None:
            from concurrent.futures import ThreadPoolExecutor  # slow to import: it brings logging

            _writer_thread.thread = ThreadPoolExecutor(1, "holdfast-write")
        self._thread = _writer_thread.thread
        self._fd = fd
        self._target = target
        self._ring = ring
        self._pending: deque[Future[None]] = deque()
        self._count = 0

    def next_buffer(self) -> memoryview:
        """The buffer for the next block; waits until its previous block is written."""
        if len(self._pending) == len(self._ring):
            self._wait()
        return self._ring[self._count % len(self._ring)]

    def submit(self, block: memoryview) -> None:
        self._pending.append(self._thread.submit(_write_block, self._fd, block))
        self._count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for, or cancel, all writes: the buffers are free afterwards."""
        try:
            while error is None and self._pending:
                self._wait()
        finally:
            for write in self._pending:
                if not write.cancel():
                    write.exception()

    def _wait(self) -> None:
        with translated(self._target):
            self._pending.popleft().result()


def _write_block(fd: int, block: memoryview) -> None:
    whole = len(block) // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        write_all(fd, block[:whole])
    except OSError as error:
        if error.errno != errno.EINVAL or not _set_direct(fd, False):
            raise
        write_all(fd, block[:whole])  # a filesystem that accepted the flag and refuses the write
    if whole < len(block):
        _set_direct(fd, False)  # the end of the file: O_DIRECT takes whole pages only
        write_all(fd, block[whole:])


def _set_direct(fd: int, wanted: bool) -> bool:
    """Switch O_DIRECT on or off; False if nothing changed, or the filesystem does not support it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) == wanted:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError:
        return False
    return True

"""Bulk bytes between local files as fast as the disk takes them, hashed on the way.

One thread reads and hashes, another writes, with a ring of page-aligned buffers between them; past the page cache
(O_DIRECT) where the filesystem lets us, which beats `cp` and fsync on the disks we measured. Preallocation gained
nothing there, and glibc emulates it by writing every block where it is not supported, so there is none.
Neighbours: `hashing` reads, `posix` chooses the files.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.storage.failures import translated
from holdfast.storage.files import write_all
from holdfast.storage.hashing import blocks, new_hasher
from holdfast.storage.store import Digest, OnBytes

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["pump"]

_BLOCK_BYTES = 1024 * 1024
_RING = 4


def pump(source: Path, fd: int, target: Path, on_bytes: OnBytes | None, direct: bool = False) -> Digest:
    """Write the file `source` to `fd`, which is empty and at its start.

    What the writing says is translated for `target`; what the reading says is left as it is. `direct` asks for
    O_DIRECT: good for what must be durable, bad for what is read again at once.
    """
    hasher = new_hasher()
    if source.stat().st_size < _BLOCK_BYTES:
        size_bytes = 0
        for block in blocks(source, hasher, on_bytes, _BLOCK_BYTES):
            with translated(target):
                write_all(fd, block)
            size_bytes += len(block)
        return Digest(size_bytes, hasher.hexdigest())

    from concurrent.futures import ThreadPoolExecutor  # slow to import: it brings logging

    ring = [memoryview(mmap.mmap(-1, _BLOCK_BYTES)) for _ in range(_RING)]
    pending: deque[Future[None]] = deque()
    sent_bytes = count = 0

    def next_buffer() -> memoryview:
        if len(pending) == _RING:
            with translated(target):
                pending.popleft().result()
        return ring[count % _RING]

    if direct:
        _set_direct(fd, True)
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-write") as writer:
        for block in blocks(source, hasher, on_bytes, buffer=next_buffer):
            pending.append(writer.submit(_write_block, fd, block))
            sent_bytes += len(block)
            count += 1
        with translated(target):
            for write in pending:
                write.result()
    return Digest(sent_bytes, hasher.hexdigest())


def _write_block(fd: int, block: memoryview) -> None:
    if len(block) % mmap.PAGESIZE:
        _set_direct(fd, False)  # the last block: O_DIRECT takes whole pages only
    try:
        write_all(fd, block)
    except OSError as error:
        if error.errno != errno.EINVAL or not _set_direct(fd, False):
            raise
        write_all(fd, block)  # a filesystem that took the flag and refuses the write


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

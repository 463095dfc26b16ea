"""Memory that an agent and its workers share, with a seal that shows whether its contents are complete.

A buffer is a memfd of the agent's: it has no name that could be left behind, and lives as long as the agent. Its first
page holds the seal, then come the files of one snapshot. A writer breaks the seal before it writes and puts a new one
when it is done; so whoever is killed half way leaves an unsealed buffer, and a reader that finds the seal it was told
of, before and after, has read that very snapshot. `snapshot` writes, `memory_checkpoint` and the agent's `buffers`
read.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import suppress
from typing import Final

from holdfast.checkpoint.state.parallel_copy import spread

__all__ = ["HEADER_BYTES", "UNSEALED", "SnapshotBuffer", "grow", "make_memory", "new_seal", "prefault", "read_seal"]

HEADER_BYTES: Final = mmap.PAGESIZE
UNSEALED: Final = 0
_SEAL_BYTES = 8
_POPULATE_WRITE = 23
_PREFAULT_BYTES = 64 * 1024 * 1024
"""So much at a time by each thread."""

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike mmap's own it leaves the interpreter's lock alone
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def make_memory(name: str) -> int:
    """The descriptor of new shared memory that can grow and never shrinks: who has it mapped is safe from SIGBUS."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def grow(fd: int, size_bytes: int) -> None:
    """Make such memory at least so large."""
    if os.fstat(fd).st_size < size_bytes:
        with suppress(PermissionError):  # it cannot shrink: somebody has just made it larger
            os.ftruncate(fd, size_bytes)


def new_seal() -> int:
    """A number that was never a seal before."""
    return int.from_bytes(os.urandom(_SEAL_BYTES), "little") | 1  # never UNSEALED


def read_seal(fd: int) -> int:
    """The seal of a buffer that is open, but not mapped."""
    return int.from_bytes(os.pread(fd, _SEAL_BYTES, 0), "little")


class SnapshotBuffer:
    """One buffer, mapped into this process as far as it reaches. `fd` is closed with it, or when it is dropped."""

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        self._fd = fd
        # A reader's view must not be marked read-only, or torch would copy from it twice: a private one does no harm.
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        self._memory: mmap.mmap | None = None
        self._mapped_bytes = 0
        self._ready_bytes = 0

    @classmethod
    def open(cls, path: str, *, writable: bool = True) -> SnapshotBuffer:
        """A buffer of another process, by its path in /proc."""
        return cls(os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC), writable=writable)

    @property
    def size_bytes(self) -> int:
        """How much it can hold as it is."""
        return max(0, os.fstat(self._fd).st_size - HEADER_BYTES)

    @property
    def seal(self) -> int:
        self._map()
        return UNSEALED if self._memory is None else int.from_bytes(self._memory[:_SEAL_BYTES], "little")

    @seal.setter
    def seal(self, value: int) -> None:
        self._map()
        if self._memory is not None:
            self._memory[:_SEAL_BYTES] = value.to_bytes(_SEAL_BYTES, "little")

    @property
    def data(self) -> memoryview:
        """What follows the seal. The view stays good when the buffer grows or is closed."""
        self._map()
        return memoryview(b"" if self._memory is None else self._memory)[HEADER_BYTES:]

    def reserve(self, size_bytes: int) -> None:
        """Make room for so much, and have every page at hand: what is then written costs no page fault. An `OSError`
        if there is no memory for it."""
        wanted = HEADER_BYTES + size_bytes
        grow(self._fd, wanted)
        self._map()
        if self._ready_bytes < wanted and self._memory is not None:
            prefault(self._memory)
            self._ready_bytes = self._mapped_bytes

    def release(self) -> None:
        """Give the memory back; the buffer stays, empty and unsealed."""
        self._map()
        if self._memory is not None:
            self._memory.madvise(mmap.MADV_REMOVE)
            self._ready_bytes = 0

    def close(self) -> None:
        """Views of its data keep the memory alive; the buffer itself is of no use any more."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._memory = -1, None

    def __del__(self) -> None:
        self.close()

    def _map(self) -> None:
        size = os.fstat(self._fd).st_size
        if size > self._mapped_bytes:
            self._memory = mmap.mmap(self._fd, size, access=self._access)
            self._mapped_bytes = size


def prefault(memory: mmap.mmap) -> None:
    """Have every page of a mapping at hand, and leave what it holds as it is. An `OSError` if memory is short."""
    address, size_bytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)

    def get(start: int) -> None:
        if _madvise(address + start, min(_PREFAULT_BYTES, size_bytes - start), _POPULATE_WRITE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    try:
        spread(get, range(0, size_bytes, _PREFAULT_BYTES))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        for page in range(0, size_bytes, mmap.PAGESIZE):  # a kernel before 5.14
            memory[page]

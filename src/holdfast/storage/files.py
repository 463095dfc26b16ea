"""Local files: atomic downloads, cheap copies, preallocation, and the type of a mount.

`atomic_download` serves every backend's `download`; `reflink` and `copy_bytes` copy for `posix` and for the worker's
staging; `mount_kind` tells `posix` and `locate` about FUSE and network mounts, and `has_shared_locks` whether `flock`
works between machines.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from holdfast.storage.failures import translated
from holdfast.storage.keys import new_temporary

__all__ = [
    "Mount",
    "copy_bytes",
    "has_shared_locks",
    "atomic_download",
    "mount_kind",
    "mount_of",
    "preallocate",
    "read_all",
    "reflink",
    "set_mode",
    "write_all",
]

_NO_COPY_RANGE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EBADF, errno.EIO}
_FICLONE = 0x40049409
_LOCAL_MOUNTS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay"}
_OCTAL = re.compile(r"\\([0-7]{3})")  # blanks and the like in /proc/self/mountinfo


_READ_BYTES = 4096
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE of fallocate(2)."""
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def atomic_download(target: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """An unbuffered file to write a download to: it becomes `target` when the block succeeds, and is deleted otherwise.
    Its mode is `mode` minus the umask. Errors of opening and renaming are translated; wrap the writing in
    `translated(target)` too."""
    temporary = target.parent / new_temporary()
    with translated(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        file = os.fdopen(fd, "wb", buffering=0)
    try:
        with file:
            yield file
        with translated(target):
            temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


class Mount(NamedTuple):
    """A mounted filesystem: its type (ext4, nfs4, fuse.rclone ...) and the directory where it is mounted."""

    kind: str
    point: str


def mount_of(directory: Path) -> Mount | None:
    """The mount that holds this directory, or the nearest one above it that exists; None where the kernel does not
    tell."""
    while not os.path.exists(directory) and directory != directory.parent:  # noqa: PTH110  pathlib raises EACCES
        directory = directory.parent
    try:
        device = directory.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        # 36 35 98:0 /root /mount/point options... - type source options
        place, _, kind = line.partition(" - ")
        fields = place.split(" ")
        if fields[2] == wanted:
            return Mount(kind.partition(" ")[0], _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4]))
    return None


def mount_kind(directory: Path) -> str:
    """The type of the filesystem that holds this directory; empty where the kernel does not tell."""
    mount = mount_of(directory)
    return mount.kind if mount is not None else ""


def has_shared_locks(directory: Path) -> bool:
    """Whether a `flock` there excludes every process that can open the file. On a local disk it does; on network and
    FUSE file systems it may hold on one machine only, even if it succeeds."""
    return mount_kind(directory) in _LOCAL_MOUNTS


def set_mode(path: Path, mode: int) -> None:
    """Give a file these permission bits, where its filesystem lets us: some mounts have one mode for all files."""
    if path.stat().st_mode & 0o777 != mode:
        with suppress(PermissionError, NotImplementedError):
            path.chmod(mode)


def reflink(source: int, target: int) -> bool:
    """Share the blocks of one open file with another; False where the filesystem cannot."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def copy_bytes(source: int, target: int) -> None:
    """Copy one open file to another, inside the kernel or the file server where they can."""
    start = 0
    try:
        while count := os.copy_file_range(source, target, 1 << 30, start, start):
            start += count
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
    # Some filesystems answer 0 or refuse halfway: read on to the real end.
    os.lseek(target, start, os.SEEK_SET)
    while block := os.pread(source, 1 << 20, start):
        write_all(target, block)
        start += len(block)


def preallocate(fd: int, size_bytes: int) -> bool:
    """Allocate blocks for the first `size_bytes` of a file without changing its size; False if that fails (no space, or
    not supported)."""
    fallocate = getattr(_libc, "fallocate", None)
    if fallocate is None:
        return False
    return bool(fallocate(fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) == 0)


def read_all(fd: int) -> bytes:
    """What is left to be read of an open file."""
    blocks: list[bytes] = []
    size_bytes = os.fstat(fd).st_size
    while block := os.read(fd, max(_READ_BYTES, size_bytes)):
        blocks.append(block)
        size_bytes -= len(block)
    return b"".join(blocks)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`, with as many writes as that takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]

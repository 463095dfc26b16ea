"""Files that appear whole or not at all, and directories that survive a crash.

The steps below `posix` (the store), also of use to any backend that writes a local file: `landing` is how a download
arrives. Every step raises plain OSErrors; `failures` translates them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from holdfast.storage.failures import translated
from holdfast.storage.keys import new_temporary

__all__ = ["NO_LINKS", "copy_bytes", "fsync_directory", "is_fuse", "landing", "reflink", "write_all"]

NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}
"""What `link` says where there are no hard links, or no more of them."""

_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF}
_NO_COPY_RANGE = {
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EIO,
}
_FICLONE = 0x40049409


def write_all(fd: int, data: bytes | memoryview) -> None:
    """All of `data`, however many writes that takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def fsync_directory(fd: int) -> None:
    """Make a directory's names durable, where the filesystem knows of such a thing (FUSE often does not)."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise


def is_fuse(directory: Path) -> bool:
    """Whether this directory, or the nearest one above that exists, is on a FUSE mount."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        device = directory.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split(" ")[2] == wanted:
            return rest.startswith("fuse")
    return False


def reflink(source: int, target: int) -> bool:
    """Share the blocks of one open file with another; False where the filesystem cannot."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def copy_bytes(source: int, target: int) -> None:
    """Copy the rest of an open file, inside the kernel or the file server where they can."""
    try:
        while os.copy_file_range(source, target, 1 << 30):
            continue
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
        os.lseek(source, 0, os.SEEK_SET)
        os.lseek(target, 0, os.SEEK_SET)
        with (
            os.fdopen(os.dup(source), "rb", buffering=0) as reader,
            os.fdopen(os.dup(target), "wb") as writer,
        ):
            shutil.copyfileobj(reader, writer, 1 << 20)


@contextmanager
def landing(target: Path) -> Iterator[BinaryIO]:
    """A file to write a download to: it becomes `target` when the block ends well, and vanishes when it does not."""
    temporary = target.parent / new_temporary()
    with translated(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("xb", buffering=0)
    try:
        with file:
            yield file
        with translated(target):
            temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise

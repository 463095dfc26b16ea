"""A file that gets its name only when it is complete.

Where the filesystem can (ext4, XFS, btrfs, tmpfs), the file is nameless while it is written (O_TMPFILE), so a crash
leaves nothing behind; elsewhere it carries a temporary's name that `list` never shows. Below `posix`.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from holdfast.storage.keys import new_temporary

__all__ = ["AtomicFile", "discard", "link_open_file", "sync"]

_NO_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF}
_NO_UNNAMED = {errno.ENOENT, errno.EPERM, errno.EXDEV, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}
_TO_BE_WRITTEN = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class AtomicFile:
    """A new file in the directory with the descriptor `directory`, open as `fd`; gone on exit unless published."""

    unnamed: ClassVar[bool] = Path("/proc/self/fd").is_dir()
    """Whether O_TMPFILE is tried: it needs /proc, and a kernel that lets such a file be linked."""

    def __init__(self, directory: int, mode: int = 0o666, *, durable: bool = True) -> None:
        """The file has `mode` minus the umask from the beginning. What is not `durable` may be lost, or empty, after a
        power cut."""
        self._durable = durable
        self._directory = directory
        self._name: str | None = None
        self._open = True
        if AtomicFile.unnamed:
            # EOPNOTSUPP or EISDIR: not on this filesystem. A directory that vanished fails again below.
            with suppress(OSError):
                self.fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, mode, dir_fd=directory)
                return
        self._name = new_temporary()
        self.fd = os.open(self._name, _TO_BE_WRITTEN, mode, dir_fd=directory)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._close()
        if self._name is not None:
            discard(self._name, self._directory)

    def create(self, name: str) -> None:
        """Give it this name, unless the name is taken (FileExistsError)."""
        self._sync(self.fd)
        if self._name is None:
            self._link(name)
        else:
            self._close()
            os.link(self._name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._sync(self._directory)

    def replace(self, name: str) -> None:
        """Give it this name in place of what had it."""
        self._sync(self.fd)
        if self._name is None:
            try:
                self._link(name)
            except FileExistsError:
                self._name = new_temporary()
                self._link(self._name)
        self._close()
        if self._name is not None:
            os.rename(self._name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._sync(self._directory)

    def _sync(self, fd: int) -> None:
        if self._durable:
            sync(fd)

    def _link(self, name: str) -> None:
        try:
            link_open_file(self.fd, name, self._directory)
        except OSError as error:
            if error.errno in _NO_UNNAMED and os.fstat(self._directory).st_nlink:
                # The directory is there, so it is nameless files that do not work here: never again in this process.
                AtomicFile.unnamed = False
                raise FileNotFoundError(errno.ENOENT, "nameless files cannot be linked", name) from error
            raise

    def _close(self) -> None:
        """Once, and with its errors: NFS and FUSE report a failed write here."""
        if self._open:
            self._open = False
            os.close(self.fd)


def link_open_file(fd: int, name: str, directory: int) -> None:
    """Hard-link the very file that is open, wherever its name has gone meanwhile."""
    # Only with a directory's descriptor does Python call linkat(), which follows the link in /proc.
    os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)


def discard(name: str, directory: int) -> None:
    """Delete a temporary file, ignoring errors."""
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)


def sync(fd: int) -> None:
    """fsync, ignoring filesystems that do not support it (FUSE often does not, least of all for directories)."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise

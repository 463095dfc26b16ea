"""Translate errors of the operating system to `holdfast.errors`.

`posix` wraps each call in `translated`; `arrow` may too, since pyarrow raises OSErrors with the same numbers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import AccessDenied, AlreadyExists, NotFound, OutOfSpace, StorageError, Unavailable

__all__ = ["translate", "translated"]

_SPACE = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_LATER = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.ENOTCONN,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EREMOTEIO,
    errno.EPIPE,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


def translate(error: OSError, path: str | os.PathLike[str]) -> StorageError:
    """The storage error that says what happened to `path`, and the way out."""
    where, code = os.fspath(path), error.errno
    reason = error.strerror or str(error)
    if code in _SPACE:
        return OutOfSpace(f"No space is left to write {where} ({reason}): free some, or choose another storage path.")
    if code == errno.EROFS:
        return AccessDenied(f"{where} is on a read-only filesystem: choose a storage path that may be written.")
    if code in _DENIED:
        return AccessDenied(f"Access to {where} was refused ({reason}): check its owner and permissions.")
    if code == errno.ENOENT:
        return NotFound(f"{where} does not exist: check the path.")
    if code == errno.EEXIST:
        return AlreadyExists(f"{where} exists already: choose another name.")
    if code in _LATER:
        return Unavailable(f"{where} cannot be reached at the moment ({reason}): check the disk or the mount.")
    if code == errno.ENOTDIR:
        return StorageError(f"{where} lies below a file, not a directory: choose another path.")
    if code == errno.EISDIR:
        return StorageError(f"{where} is a directory, not a file: choose another path.")
    if code == errno.ENAMETOOLONG:
        return StorageError(f"{where} is too long a name for this filesystem: shorten it.")
    return StorageError(f"{where} failed: {reason}; check the filesystem there.")


@contextmanager
def translated(path: str | os.PathLike[str]) -> Iterator[None]:
    """Any OSError inside becomes the storage error for `path`."""
    try:
        yield
    except OSError as error:
        raise translate(error, path) from error

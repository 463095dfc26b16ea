"""Translation of OS errors."""

from __future__ import annotations

import errno
import os

import pytest

from holdfast.errors import AccessDenied, AlreadyExists, NotFound, OutOfSpace, StorageError, Unavailable
from holdfast.storage.failures import translate


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, OutOfSpace),
        (errno.EDQUOT, OutOfSpace),
        (errno.EACCES, AccessDenied),
        (errno.EPERM, AccessDenied),
        (errno.EROFS, AccessDenied),
        (errno.ENOENT, NotFound),
        (errno.EEXIST, AlreadyExists),
        (errno.EIO, Unavailable),
        (errno.ESTALE, Unavailable),
        (errno.ETIMEDOUT, Unavailable),
        (errno.ENOTDIR, StorageError),
        (errno.EISDIR, StorageError),
        (errno.ENAMETOOLONG, StorageError),
        (errno.EXDEV, StorageError),
    ],
)
def test_os_errors_are_translated(code: int, kind: type[StorageError]) -> None:
    error = translate(OSError(code, os.strerror(code)), "/some/where")
    assert type(error) is kind
    assert str(error).startswith(("/some/where ", "No space is left to write /some/where", "Access to /some/where"))
    assert "\n" not in str(error)

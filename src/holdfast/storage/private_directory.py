"""Directories that only their owner may enter: the cache, staging, session directories and temporary files.

They hold files that are not published yet, and files whose modes the user chose. `local_cache` finds the cache.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from holdfast.errors import ConfigError

__all__ = ["claim_private_directory", "make_private_directory"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private_directory(directory: Path) -> Path:
    """Make a directory of mode 0700, with its parents. An existing one of ours is made private; another user's is left
    as it is."""
    try:
        directory.mkdir(mode=0o700)
    except FileNotFoundError:
        if not directory.parent.exists():  # or nothing can be made there, as in /proc, whose own mode must stay
            make_private_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)  # somebody else may have made either
    except FileExistsError:
        found = directory.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise
        if found.st_mode & _OTHERS and found.st_uid == os.getuid():
            with suppress(OSError):  # a filesystem without modes
                directory.chmod(0o700)
    return directory


def claim_private_directory(directory: Path) -> Path:
    """Make a directory of a well-known name where anybody may make some (/tmp); refuse one that is not ours alone.

    It is made first and looked at afterwards, through a descriptor that follows no link: whoever was faster is found.
    """
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(directory, error.strerror or "it cannot be used") from error
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid():
            raise _refused(directory, "it belongs to another user")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _refused(directory, "others may write to it")
        if found.st_mode & _OTHERS:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return directory


def _refused(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"The cache cannot be {directory} ({why}): set HOLDFAST_LOCAL_CACHE_DIR to a directory of yours."
    )

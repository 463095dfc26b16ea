"""A directory with a lock file beside it: whoever holds the lock may remove the directory, and nobody else.

The kernel drops the locks of the dead. Where files cannot be locked at all, a lock file belongs to whoever made it.
`agent.process_directory` makes such directories; the agent's zygote removes that of an agent which was killed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

__all__ = ["LOCK_SUFFIX", "lock_path_of", "remove_unlocked", "take_lock"]

LOCK_SUFFIX = ".lock"
_REMOVING = "removing-"
"""Begins the name of a directory that is being removed."""


def lock_path_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}{LOCK_SUFFIX}")


def take_lock(path: Path, *, inherits: bool = False) -> int | None:
    """A descriptor that holds the lock; None where someone else does. Where the filesystem has no locks, it goes to
    whoever makes the file, and to who `inherits` it."""
    while True:
        made = not path.exists()
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(lock).st_ino:
                    return lock
        except OSError as error:
            if (made or inherits) and not isinstance(error, BlockingIOError):
                return lock
            os.close(lock)
            return None
        os.close(lock)  # its holder removed it just then


def remove_unlocked(directory: Path, *, inherits: bool = False) -> bool:
    """Remove a directory and its lock, unless somebody holds that. The name is free for the next process at once: what
    is in the directory goes under another name, which may take a while."""
    lock_path = lock_path_of(directory)
    lock = take_lock(lock_path, inherits=inherits)
    if lock is None:
        return False
    doomed = directory
    if not directory.name.startswith(_REMOVING):  # one whose removal was interrupted
        doomed = directory.with_name(f"{_REMOVING}{secrets.token_hex(4)}-{directory.name}")
        try:
            directory.rename(doomed)
        except OSError:  # it is not there
            doomed = directory
    if doomed == directory:
        shutil.rmtree(directory, ignore_errors=True)
    lock_path.unlink(missing_ok=True)
    os.close(lock)
    if doomed != directory:
        shutil.rmtree(doomed, ignore_errors=True)
    return True

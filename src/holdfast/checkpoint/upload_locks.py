"""Locks that show which drafts a process on this node still uploads to; the kernel releases them with their holder.

An agent holds a lock on `<cache>/agents/<agent>/uploads/<token>` from the order to upload until the checkpoint is
committed or abandoned. So the next controller can wait for an agent that finishes the uploads of a dead one
(`control.setup`), and nobody deletes a draft that is being written to.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from holdfast.runtime import current
from holdfast.storage.local_cache import local_cache_dir
from holdfast.storage.private_directory import make_private_directory

__all__ = ["UploadLock", "is_uploading"]

_DIRECTORY = "uploads"


class UploadLock:
    """A held lock: this process uploads to the draft of `token`, until `release`."""

    def __init__(self, session: Path, token: str) -> None:
        """`session` is the agent's directory, `<cache>/agents/<agent>`."""
        self._path = make_private_directory(session / _DIRECTORY) / token
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # a filesystem without locks: then nobody waits for this upload

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def is_uploading(token: str, cache: Path | None = None) -> bool:
    """Whether a living process of this node uploads to the draft of this token. Other nodes are not known."""
    if not token.isalnum():
        return False
    return current().has_locked_file(cache or local_cache_dir(), f"agents/*/{_DIRECTORY}/{token}")

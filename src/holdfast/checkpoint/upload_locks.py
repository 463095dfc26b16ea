"""Locks that show which drafts a process on this node still uploads to; the kernel releases them with their holder.

An agent holds a lock on `<cache>/agents/<agent>/uploads/<token>` from the order to upload until the checkpoint is
committed or abandoned. So the next controller can wait for an agent that finishes the uploads of a dead one
(`control.setup`), and nobody deletes a draft that is being written to.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.runtime import current
from holdfast.storage.local_cache import local_cache_dir

__all__ = ["UploadLock", "is_uploading"]

_DIRECTORY = "uploads"


class UploadLock:
    """A held lock: this process uploads to the draft of `token`, until `release`."""

    def __init__(self, session: Path, token: str) -> None:
        """`session` is the agent's directory, `<cache>/agents/<agent>`."""
        self.release = current().lock_file(session / _DIRECTORY / token)


def is_uploading(token: str, cache: Path | None = None) -> bool:
    """Whether a living process of this node uploads to the draft of this token. Other nodes are not known."""
    if not token.isalnum():
        return False
    return current().has_locked_file(cache or local_cache_dir(), f"agents/*/{_DIRECTORY}/{token}")

"""Locks that show which drafts a process on this node still uploads to; the kernel releases them with their holder.

An agent holds a lock on `<cache>/agents/<agent>/uploads/<token>` from the order to upload until the checkpoint is
committed or abandoned. So the next controller can wait for an agent that finishes the uploads of a dead one
(`control.setup`), and nobody deletes a draft that is being written to. An agent that does not see the storage finishes
its uploads through the next controller's own process, which knows of them itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.runtime import current
from holdfast.storage.local_cache import local_cache_dir

__all__ = ["UploadLock", "is_uploading", "streamed_uploads"]

_DIRECTORY = "uploads"
_streamed: list[str] = []
"""Tokens of the drafts that agents are uploading to through this process."""


class UploadLock:
    """A held lock: this process uploads to the draft of `token`, until `release`."""

    def __init__(self, session: Path, token: str) -> None:
        """`session` is the agent's directory, `<cache>/agents/<agent>`."""
        self.release = current().lock_file(session / _DIRECTORY / token)


@contextmanager
def streamed_uploads(tokens: Collection[str]) -> Iterator[None]:
    """During the block an agent uploads to the drafts of these tokens through this process's storage server."""
    _streamed.extend(tokens)
    try:
        yield
    finally:
        for token in tokens:
            _streamed.remove(token)


def is_uploading(token: str, cache: Path | None = None) -> bool:
    """Whether a living process of this node, or one that does so through this process, uploads to the draft of this
    token. Other nodes are not known."""
    if token in _streamed:
        return True
    if not token.isalnum():
        return False
    return current().has_locked_file(cache or local_cache_dir(), f"agents/*/{_DIRECTORY}/{token}")

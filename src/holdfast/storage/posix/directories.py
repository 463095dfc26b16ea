"""Directories that are durable, are created when they are written to, and are removed when they are empty.

A file is durable only if the names of all the directories above it are: each one's parent is fsynced once. Deletions
prune empty directories, other processes' included, so whoever writes must be ready to make them again. Below `posix`.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from holdfast.storage.posix.atomic_file import sync

__all__ = ["Directories"]

_TRIES = 100
_KNOWN_AT_MOST = 10_000


class Directories:
    """Makes and prunes directories, and remembers which of them are known to be durable."""

    def __init__(self) -> None:
        self._durable: set[Path] = set()

    def open(self, directory: Path, root: Path) -> int:
        """A descriptor of the directory, which is created with its parents if needed."""
        for _ in range(_TRIES):
            try:
                self._make_durable(directory, root)
                return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                self.forget(directory)  # pruned in between, or long ago by another process
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))

    def forget(self, directory: Path) -> None:
        """Forget that this directory is durable: it, or one above it, may have been removed."""
        self._durable.difference_update((directory, *directory.parents))

    def sync_deletion(self, directory: Path, root: Path) -> None:
        """Make deletions in a directory durable; remove it, and its parents up to the root, if they are empty now."""
        with suppress(FileNotFoundError, NotADirectoryError):
            _sync_directory(directory)
        while directory != root and directory.is_relative_to(root):
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return  # not empty, or not ours to remove: either way it stays
            self._durable.discard(directory)
            directory = directory.parent

    def _make_durable(self, directory: Path, root: Path) -> None:
        if directory in self._durable:
            return
        try:
            made = _make(directory)
        except FileNotFoundError:
            # The one above is missing, whatever is remembered of it. Should it vanish again, `open` starts over.
            if directory == directory.parent:
                raise
            self.forget(directory.parent)
            self._make_durable(directory.parent, root)
            made = _make(directory)
        # One that is there already may have been made by another process a moment ago: it is synced all the same.
        if directory != root and directory.is_relative_to(root):
            self._make_durable(directory.parent, root)
        if made or directory.is_relative_to(root):
            with suppress(PermissionError):  # a parent that may be passed but not read
                _sync_directory(directory.parent)
        if len(self._durable) >= _KNOWN_AT_MOST:
            self._durable.clear()
        self._durable.add(directory)


def _make(directory: Path) -> bool:
    """Whether this call created it; FileNotFoundError if its parent is missing, or it was removed at once."""
    try:
        directory.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(directory.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory)) from None
        return False
    return True


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)

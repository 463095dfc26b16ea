"""Directories that are durable, are created when they are written to, and are removed when they are empty.

A file is durable only if the names of all the directories above it are: each one's parent is fsynced once. Deletions
prune empty directories, other processes' included, so whoever writes must be ready to make them again. Below `posix`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
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
        self._volatile: set[Path] = set()
        """Those that were made here and are not durable yet."""

    def open(self, directory: Path, root: Path, *, durable: bool = True) -> int:
        """A descriptor of the directory, which is created with its parents if needed; its name is durable then, or will
        be when `sync` or another call asks for it."""
        for _ in range(_TRIES):
            try:
                if durable:
                    self._make_durable(directory, root)
                else:
                    self._make_volatile(directory)
                return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                self.forget(directory)  # pruned in between, or long ago by another process
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))

    def forget(self, directory: Path) -> None:
        """Forget that this directory is durable: it, or one above it, may have been removed."""
        self._durable.difference_update((directory, *directory.parents))

    def sync(self, directories: Iterable[Path], names: Iterable[Path], root: Path) -> None:
        """Make what lies in these directories durable, and the names of those and others, with one fsync each."""
        to_sync = set(directories)
        unknown = {*to_sync, *names}
        made: set[Path] = set()
        while unknown:
            directory = unknown.pop()
            if directory not in self._durable and (directory.is_relative_to(root) or directory in self._volatile):
                made.add(directory)
                to_sync.add(directory.parent)
                unknown.add(directory.parent)
        for directory in sorted(to_sync):
            with suppress(PermissionError):  # a parent that may be passed but not read
                _sync_directory(directory)
        self._durable |= made
        self._volatile -= made

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

    def _make_volatile(self, directory: Path) -> None:
        try:
            made = _make(directory)
        except FileNotFoundError:
            if directory == directory.parent:
                raise
            self._make_volatile(directory.parent)
            made = _make(directory)
        if made:
            self._durable.discard(directory)
            self._volatile.add(directory)

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
        if directory in self._volatile:
            made = True
            self._volatile.discard(directory)
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

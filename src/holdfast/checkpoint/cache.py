"""The node's cache: a remote checkpoint is downloaded once a node, however many processes need it at once.

Each cached directory has a lock file. Readers hold it shared, also while a second lock decides who downloads; when a
reader is done it tries to lock exclusively, and the one that succeeds was the last and cleans up. The kernel
drops a dead process's locks, so a crash leaves at worst a directory that the next reader uses or `sweep_cache` removes.
`handle` is the user; `restore` downloads.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blake3 import blake3

from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.process_identity import machine_id
from holdfast.checkpoint.restore import fetch_manifest
from holdfast.storage.files import has_shared_locks
from holdfast.storage.local_cache import local_cache_dir
from holdfast.storage.private_directory import make_private_directory
from holdfast.storage.store import Store

__all__ = ["shared_copy", "shared_directory", "sweep_cache"]

_LOCK = ".lock"
_FILLING = ".filling"
_PARTIAL = ".partial-"
_TRASH = ".trash-"


@contextmanager
def shared_directory(store: Store, manifest: Manifest, name: str | None = None) -> Iterator[Path]:
    """A local directory with a committed checkpoint's files, to read only, for as long as the block lasts.

    `name` is its directory below the store's root, where that is not what the manifest says.
    """
    where = manifest.name if name is None else name
    if store.local_root is not None:
        yield store.local_root / where if where else store.local_root
        return
    with shared_copy(
        (store.uri, where, manifest.token), lambda target: fetch_manifest(store, where, manifest, target)
    ) as directory:
        yield directory


@contextmanager
def shared_copy(identity: tuple[str, ...], fill: Callable[[Path], object]) -> Iterator[Path]:
    """The directory that `fill` made for this identity: made once for all readers, removed when the last one is
    done."""
    root = _root()
    directory = root / blake3("\0".join(identity).encode()).hexdigest()[:32]
    lock = _enter(directory, fill)
    try:
        yield directory
    finally:
        _leave(directory, lock)


def sweep_cache() -> list[str]:
    """Remove what crashed processes left in this node's cache; returns the names. What is in use stays."""
    root = _root()
    swept: list[str] = []
    for key in sorted({entry.name.partition(".")[0] for entry in root.iterdir()}):
        lock = _open_lock(root / key)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(lock, root / key):
                _clear(root / key)
                swept.append(key)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
    return swept


def _enter(directory: Path, fill: Callable[[Path], object]) -> int:
    """A descriptor that holds the lock shared, with the directory complete.

    The process that fills holds a second lock for that, and the first one shared like all readers: if it held the first
    exclusively, others would wait until its user is done with the directory.
    """
    while True:
        lock = _open_lock(directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_current(lock, directory):
                if not directory.exists():
                    _fill_once(directory, fill)
                return lock  # nobody removes it while we hold this
        except BaseException:
            _leave(directory, lock)
            raise
        os.close(lock)


def _fill_once(directory: Path, fill: Callable[[Path], object]) -> None:
    filling = os.open(_filling_path(directory), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(filling, fcntl.LOCK_EX)
        if not directory.exists():
            _fill(directory, fill)
    finally:
        os.close(filling)


def _leave(directory: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_current(lock, directory):
            _clear(directory)
    except BlockingIOError:
        return  # somebody else is still reading, and will clean up
    finally:
        os.close(lock)


def _fill(directory: Path, fill: Callable[[Path], object]) -> None:
    """Under the lock for filling: the rename is what makes a download complete."""
    _clear_strays(directory)
    partial = directory.with_name(f"{directory.name}{_PARTIAL}{secrets.token_hex(6)}")
    try:
        fill(partial)
        partial.mkdir(exist_ok=True)
        _set_writable(partial, False)
        partial.rename(directory)
    except BaseException:
        _remove_tree(partial)
        raise


def _clear(directory: Path) -> None:
    """Under the exclusive lock: remove everything of this key, the lock file last. A process that waits for that lock
    notices that the file is stale."""
    trash = directory.with_name(f"{directory.name}{_TRASH}{secrets.token_hex(6)}")
    with suppress(FileNotFoundError):
        directory.rename(trash)
    _clear_strays(directory)
    _filling_path(directory).unlink(missing_ok=True)
    _lock_path(directory).unlink(missing_ok=True)


def _clear_strays(directory: Path) -> None:
    for kind in (_PARTIAL, _TRASH):
        # `.partial` of `restore.fetch` starts with a dot and the same name.
        for pattern in (f"{directory.name}{kind}*", f".{directory.name}{kind}*"):
            for stray in directory.parent.glob(pattern):
                _remove_tree(stray)


def _remove_tree(tree: Path) -> None:
    if tree.exists():
        _set_writable(tree, True)
    shutil.rmtree(tree, ignore_errors=True)


def _set_writable(tree: Path, writable: bool) -> None:
    """Shared files are read-only: a reader that writes would change what the others read."""
    change = stat.S_IWUSR if writable else stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    for folder, _, names in os.walk(tree):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            mode = stat.S_IMODE(path.stat().st_mode)
            path.chmod(mode | change if writable else mode & ~change)


def _root() -> Path:
    """The cache's root; one for each machine where locks may hold on one machine only."""
    root = make_private_directory(local_cache_dir() / "checkpoints")
    return root if has_shared_locks(root) else make_private_directory(root / f"on-{machine_id()}")


def _lock_path(directory: Path) -> Path:
    return directory.with_name(directory.name + _LOCK)


def _filling_path(directory: Path) -> Path:
    return directory.with_name(directory.name + _FILLING)


def _open_lock(directory: Path) -> int:
    return os.open(_lock_path(directory), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_current(lock: int, directory: Path) -> bool:
    """Whether the locked file is still the one at its path."""
    try:
        found = _lock_path(directory).stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(lock)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

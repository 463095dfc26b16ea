"""The directories that workers run in: `<cache>/work/<run>-<digest>`, one for each run, kept between its drivers.

What a function writes with a relative path lies there, so a directory outlives its run: people look for their files
after it. An empty one goes with its run, any other when no agent has used it for 30 days. An agent that uses one holds
a shared lock on it, which the kernel releases with the agent, and renews its time: where machines share the cache,
locks may hold on one of them only. `session_dir` owns the agent's other directories.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from holdfast.storage.private_directory import make_private_directory

__all__ = ["UNUSED_S", "WorkDirs", "sweep_work_dirs"]

UNUSED_S = 30 * 86_400.0
_REMOVING = ".removing"
"""Ends the name of a directory that is being removed; those of runs end with a digest."""


class WorkDirs:
    """The work directories of one agent's runs."""

    def __init__(self, *, removes_empty: bool) -> None:
        """`removes_empty`: the locks exclude whoever else may use a directory."""
        self._removes_empty = removes_empty
        self._fds: dict[Path, int] = {}
        self._users: Counter[Path] = Counter()

    def use(self, path: Path) -> None:
        """Make the directory, if it is not there, and keep it from being removed until it is released."""
        self._users[path] += 1
        while path not in self._fds:
            make_private_directory(path)
            with suppress(FileNotFoundError):  # removed just then
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with suppress(OSError):  # a filesystem without locks
                    fcntl.flock(fd, fcntl.LOCK_SH)
                if _is_at(fd, path):
                    os.utime(fd)
                    self._fds[path] = fd
                else:
                    os.close(fd)

    def release(self, path: Path) -> None:
        """A run does not use it any more. One in which nobody has left a file goes: an experiment has thousands."""
        self._users[path] -= 1
        if self._users[path]:
            return
        del self._users[path]
        fd = self._fds.pop(path)
        with suppress(OSError):  # somebody else uses it, or there is something in it
            if self._removes_empty:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.rmdir()
        os.close(fd)

    def renew_times(self) -> None:
        for fd in self._fds.values():
            with suppress(OSError):
                os.utime(fd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


def sweep_work_dirs(work: Path) -> list[str]:
    """Remove the directories below `work` that no agent has used for `UNUSED_S`; gives their names."""
    swept = []
    with suppress(FileNotFoundError):
        for path in sorted(work.iterdir()):
            if path.name.endswith(_REMOVING):
                shutil.rmtree(path, ignore_errors=True)  # of a sweep that was interrupted
            elif _is_unused(path) and _remove(path):
                swept.append(path.name)
    return swept


def _is_unused(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > UNUSED_S
    except OSError:
        return False


def _remove(path: Path) -> bool:
    """Remove it unless an agent holds it. It is renamed under the lock: who uses the name from then on gets another."""
    removing = path.with_name(f"{path.name}{_REMOVING}")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # not a directory, or gone
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # no locks here: its time was not renewed, which has to do
        if not _is_at(fd, path) or not _is_unused(path):
            return False
        path.rename(removing)
    except OSError:
        return False
    finally:
        os.close(fd)
    shutil.rmtree(removing, ignore_errors=True)
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False

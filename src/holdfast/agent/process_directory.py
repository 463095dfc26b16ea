"""A directory that lives as long as its process: its lock tells others whether it may go.

`<root>/<name>/`, with a lock file beside it that the process holds as long as it lives. The kernel drops the locks of
the dead, so that a lock which can be taken means a directory that can go: whoever makes the next directory removes it.

Where machines share the root (a home directory on NFS), a lock may hold on one of them only. There the names carry the
machine, each machine sweeps its own, and another's only when its lock file was not renewed for a week.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.process_identity import machine_id
from holdfast.linux.locked_directory import LOCK_SUFFIX, lock_path_of, remove_unlocked, take_lock
from holdfast.storage.files import has_shared_locks
from holdfast.storage.private_directory import make_private_directory

__all__ = ["ProcessDirectory", "sweep_dead"]

_ABANDONED_S = 7 * 86_400.0
_PATIENCE_S = 2.0
"""How long a lock is tried for. Whoever sweeps has it for a moment; it may have little of the processor."""
_PAUSE_S = 0.01


class ProcessDirectory:
    """The directory of this process; empty, and removed by `remove`. Raises `FileExistsError` if another process that
    lives has one of this name."""

    def __init__(self, root: Path, name: str) -> None:
        make_private_directory(root)
        sweep_dead(root)
        self.has_shared_locks = has_shared_locks(root)
        name = name if self.has_shared_locks else f"{name}@{machine_id()}"
        self.path = root / name
        self.lock_path = lock_path_of(self.path)
        self._lock = self._take_lock()
        shutil.rmtree(self.path, ignore_errors=True)
        make_private_directory(self.path)

    def _take_lock(self) -> int:
        deadline = time.monotonic() + _PATIENCE_S
        while (lock := take_lock(self.lock_path)) is None:
            if time.monotonic() > deadline:
                raise FileExistsError(f"{self.path} is another process's.")
            time.sleep(_PAUSE_S)
        return lock

    def renew_times(self) -> None:
        """Once a day at least, for machines that share the root."""
        with suppress(OSError):
            os.utime(self._lock)

    def remove(self) -> None:
        """Remove the directory, then its lock: a directory without a lock is nobody's."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock_path.unlink(missing_ok=True)
        os.close(self._lock)


def sweep_dead(root: Path) -> list[str]:
    """Remove the directories of processes that no longer live, as far as this machine can know; gives their names."""
    swept = []
    shared_locks, mine = has_shared_locks(root), f"@{machine_id()}"
    for name in sorted({entry.name.removesuffix(LOCK_SUFFIX) for entry in root.iterdir()}):
        if not shared_locks and not name.endswith(mine) and not _is_abandoned(root / name):
            continue
        if remove_unlocked(root / name):
            swept.append(name)
    return swept


def _is_abandoned(path: Path) -> bool:
    """Whether neither it nor its lock was touched for so long that a process on any machine would have renewed them."""
    times = []
    for one in (path, lock_path_of(path)):
        with suppress(FileNotFoundError):
            times.append(one.stat().st_mtime)
    return bool(times) and time.time() - max(times) > _ABANDONED_S

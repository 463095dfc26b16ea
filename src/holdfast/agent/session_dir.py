"""The agent's own directory on its node: staged parts, logs and error files; gone when the agent is.

`<cache>/agents/<agent id>/`, with a lock file beside it that the agent holds as long as it lives. The kernel drops the
locks of the dead, so that a lock which can be taken means a directory that can go. An agent that was killed cannot
clean up after itself: its zygote does so, and if that was killed too, the next agent on the node does.

Where machines share the cache (a home directory on NFS), a lock may hold on one of them only. There the names carry the
machine, each machine sweeps its own, and another's only when its lock file was not renewed for a week.

Workers see their TMPDIR through a short symbolic link in /tmp: the address of a Unix socket has 107 bytes, and what
multiprocessing puts below TMPDIR (DataLoader workers send tensors through such sockets) must fit as well. Behind the
link the files stay on the cache's filesystem, so that a reported directory can be renamed into staging.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.agent.work_dirs import WorkDirs, sweep_work_dirs
from holdfast.checkpoint.process_identity import machine_id
from holdfast.storage.files import has_shared_locks
from holdfast.storage.local_cache import local_cache_dir
from holdfast.storage.private_directory import make_private_directory

__all__ = ["RunDirectory", "SessionDir", "remove_dangling_links", "sweep_dead"]

_LOCK = ".lock"
_ABANDONED_S = 7 * 86_400.0
_LINK_PREFIX = "hf-"
_LINK_DIRECTORIES = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
_log = logging.getLogger(__name__)


class SessionDir:
    """The agent's directory. Created at once, removed by `remove`."""

    def __init__(self, agent: str, root: Path | None = None) -> None:
        agents = make_private_directory((root or local_cache_dir()) / "agents")
        sweep_dead(agents)
        sweep_work_dirs(agents.parent / "work")
        remove_dangling_links()
        shared_locks = has_shared_locks(agents)
        self.work_dirs = WorkDirs(removes_empty=shared_locks)
        name = agent if shared_locks else f"{agent}@{machine_id()}"
        self.path = agents / name
        self.lock_path = agents / f"{name}{_LOCK}"
        lock = _lock_file(self.lock_path)
        if lock is None:
            raise FileExistsError(f"Another agent {agent} lives on this node: give this one another --agent-id.")
        self._lock = lock
        self._runs = 0
        shutil.rmtree(self.path, ignore_errors=True)
        make_private_directory(self.path / "tmp")
        self.temp_link = _make_link(self.path / "tmp")

    def run(self, run: str) -> RunDirectory:
        """The directories of one run; nothing is made yet."""
        self._runs += 1
        return RunDirectory(self, run, self._runs)

    @property
    def leftovers(self) -> list[Path]:
        """What must be removed if this process is killed, in this order."""
        return [*([] if self.temp_link is None else [self.temp_link]), self.path, self.lock_path]

    def renew_times(self) -> None:
        """Renew the times of the link, the lock and work directories: systemd-tmpfiles removes what lies in /tmp unused
        for days, and other machines what lies in a shared cache unused for a week, or a month."""
        self.work_dirs.renew_times()
        with suppress(OSError):
            os.utime(self._lock)
        if self.temp_link is not None:
            with suppress(OSError):
                os.utime(self.temp_link, follow_symlinks=False)

    def remove(self) -> None:
        """Remove the directory, then its lock: a directory without a lock is nobody's."""
        self.work_dirs.close()
        if self.temp_link is not None:
            self.temp_link.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock_path.unlink(missing_ok=True)
        os.close(self._lock)


class RunDirectory:
    """What one run has in the agent's directory: staged parts, temporary files, logs and error files."""

    def __init__(self, session: SessionDir, run: str, number: int) -> None:
        """`number` is a short name for the run."""
        self.session = session
        self.path = session.path / "runs" / run
        self._number = number
        self._temporary: dict[int, Path] = {}
        """The workers' TMPDIR of each generation that has one."""
        self._work_dir: Path | None = None

    def staging(self, generation: int) -> Path:
        """Made by the first worker that has something for it."""
        return self.path / "staging" / f"generation_{generation:06d}"

    def temporary(self, generation: int) -> Path:
        """The workers' TMPDIR: what a killed one leaves in it goes with its generation."""
        self._temporary[generation] = path = self._made(self.session.path, "tmp", f"{self._number}-{generation}")
        link = self.session.temp_link
        return path if link is None else link / path.name

    def drop_temporary(self, generation: int) -> bool:
        """Its workers are gone: remove their TMPDIR if it is empty, as most are. False if it is not."""
        path = self._temporary.get(generation)
        try:
            if path is not None:
                path.rmdir()
        except OSError:
            return False
        self._temporary.pop(generation, None)
        return True

    def remove_temporary(self, generation: int) -> None:
        """Remove what is in there, too, which may take a while."""
        if (path := self._temporary.pop(generation, None)) is not None:
            _remove(path)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_file(self, generation: int, rank: int) -> Path:
        return self.logs / f"generation_{generation:06d}" / f"rank_{rank}.log"

    def error_file(self, generation: int, rank: int) -> Path:
        return self._made(self.path) / f"error_{generation:06d}_{rank}.json"

    def make_work_dir(self, path: Path) -> None:
        """Make the directory that workers work in."""
        if path != self._work_dir:
            self._release_work_dir()
            self.session.work_dirs.use(path)
            self._work_dir = path

    def remove(self) -> None:
        for path in (self.path, *self._temporary.values()):
            _remove(path)
        self._release_work_dir()

    def _release_work_dir(self) -> None:
        if self._work_dir is not None:
            self.session.work_dirs.release(self._work_dir)
            self._work_dir = None

    def _made(self, root: Path, *parts: str) -> Path:
        return make_private_directory(root.joinpath(*parts))


def _remove(path: Path) -> None:
    try:
        path.rmdir()  # most are empty
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def sweep_dead(agents: Path) -> list[str]:
    """Remove the directories of agents that no longer live, as far as this machine can know; gives their names."""
    swept = []
    shared_locks, mine = has_shared_locks(agents), f"@{machine_id()}"
    for name in sorted({entry.name.removesuffix(_LOCK) for entry in agents.iterdir()}):
        lock_path = agents / f"{name}{_LOCK}"
        if not shared_locks and not name.endswith(mine) and not _is_abandoned(agents / name, lock_path):
            continue
        lock = _lock_file(lock_path)
        if lock is not None:
            shutil.rmtree(agents / name, ignore_errors=True)
            lock_path.unlink(missing_ok=True)
            os.close(lock)
            swept.append(name)
    return swept


def _is_abandoned(path: Path, lock_path: Path) -> bool:
    """Whether neither was touched for so long that an agent on any machine would have renewed them."""
    times = []
    for one in (path, lock_path):
        with suppress(FileNotFoundError):
            times.append(one.stat().st_mtime)
    return bool(times) and time.time() - max(times) > _ABANDONED_S


def remove_dangling_links(directories: Sequence[Path] = _LINK_DIRECTORIES) -> None:
    """Remove this user's links to temporary directories of agents that are gone."""
    for directory in directories:
        with suppress(OSError), os.scandir(directory) as entries:  # Path is slow, and there may be thousands
            for entry in entries:
                if entry.name.startswith(_LINK_PREFIX) and entry.is_symlink() and _is_dangling(entry):
                    Path(entry.path).unlink(missing_ok=True)


def _is_dangling(link: os.DirEntry[str]) -> bool:
    """Whether this user's link leads to the temporary directory of an agent, which is not there."""
    target = os.path.join(os.path.dirname(link.path), os.readlink(link.path))  # noqa: PTH115, PTH118, PTH120
    parts = target.split("/")
    is_ours = parts[-1] == "tmp" and parts[-3:-2] == ["agents"]
    return is_ours and link.stat(follow_symlinks=False).st_uid == os.getuid() and not os.path.exists(target)  # noqa: PTH110


def _make_link(target: Path) -> Path | None:
    """A short path to an existing directory; None where no link can be made, so that the long path must do."""
    for directory in _LINK_DIRECTORIES:
        link = directory / f"{_LINK_PREFIX}{secrets.token_hex(6)}"
        with suppress(OSError):
            link.symlink_to(target.resolve())
            return link
    _log.warning("Neither /tmp nor /var/tmp can be written: workers use %s as TMPDIR.", target)
    return None


def _lock_file(path: Path) -> int | None:
    """A descriptor that holds the lock; None where someone else does. Where the filesystem has no locks, it goes to
    whoever makes the file."""
    while True:
        made = not path.exists()
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(lock).st_ino:
                    return lock
        except OSError as error:
            if made and not isinstance(error, BlockingIOError):
                return lock
            os.close(lock)
            return None
        os.close(lock)  # its holder removed it just then

"""The agent's own directory on its node: staged parts, logs and error files; gone when the agent is.

`<cache>/agents/<agent id>/`, a `ProcessDirectory`. An agent that was killed cannot clean up after itself: its zygote
does so, and if that was killed too, the next agent on the node does.

Workers see their TMPDIR through a short symbolic link in /tmp: the address of a Unix socket has 107 bytes, and what
multiprocessing puts below TMPDIR (DataLoader workers send tensors through such sockets) must fit as well. Behind the
link the files stay on the cache's filesystem, so that a reported directory can be renamed into staging.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.agent.process_directory import ProcessDirectory
from holdfast.agent.work_dirs import WorkDirs, sweep_work_dirs
from holdfast.storage.local_cache import local_cache_dir
from holdfast.storage.private_directory import make_private_directory

__all__ = ["RunDirectory", "SessionDir", "remove_dangling_links"]

_LINK_PREFIX = "hf-"
_LINK_DIRECTORIES = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
_log = logging.getLogger(__name__)


class SessionDir:
    """The agent's directory. Created at once, removed by `remove`."""

    def __init__(self, agent: str, root: Path | None = None) -> None:
        agents = (root or local_cache_dir()) / "agents"
        try:
            self._directory = ProcessDirectory(agents, agent)
        except FileExistsError as error:
            raise FileExistsError(
                f"Another agent {agent} lives on this node: give this one another --agent-id."
            ) from error
        self.path, self.lock_path = self._directory.path, self._directory.lock_path
        sweep_work_dirs(agents.parent / "work")
        remove_dangling_links()
        self.work_dirs = WorkDirs(removes_empty=self._directory.has_shared_locks)
        self._spare: list[Path] = []
        """Workers' TMPDIRs of generations that have ended, which are empty."""
        self._temporary = 0
        make_private_directory(self.path / "tmp")
        self.temp_link = _make_link(self.path / "tmp")

    def run(self, run: str) -> RunDirectory:
        """The directories of one run; nothing is made yet."""
        return RunDirectory(self, run)

    def make_temporary(self) -> Path:
        """An empty directory for the TMPDIR of some workers. One that others have left so is as good, and costs nothing
        to make: an experiment needs thousands."""
        if self._spare:
            return self._spare.pop()
        self._temporary += 1
        return make_private_directory(self.path / "tmp" / str(self._temporary))

    def take_back(self, temporary: Path) -> bool:
        """The workers are gone; False if they left something in it."""
        with suppress(OSError), os.scandir(temporary) as entries:
            if next(entries, None) is None:
                self._spare.append(temporary)
                return True
        return False

    @property
    def leftovers(self) -> list[Path]:
        """What must be removed if this process is killed, in this order: a link, and a directory with its lock."""
        return [*([] if self.temp_link is None else [self.temp_link]), self.path]

    def renew_times(self) -> None:
        """Renew the times of the link, the lock and work directories: systemd-tmpfiles removes what lies in /tmp unused
        for days, and other machines what lies in a shared cache unused for a week, or a month."""
        self.work_dirs.renew_times()
        self._directory.renew_times()
        if self.temp_link is not None:
            with suppress(OSError):
                os.utime(self.temp_link, follow_symlinks=False)

    def remove(self) -> None:
        self.work_dirs.close()
        if self.temp_link is not None:
            self.temp_link.unlink(missing_ok=True)
        self._directory.remove()


class RunDirectory:
    """What one run has in the agent's directory: staged parts, temporary files, logs and error files."""

    def __init__(self, session: SessionDir, run: str) -> None:
        self.session = session
        self.path = session.path / "runs" / run
        self._temporary: dict[int, Path] = {}
        """The workers' TMPDIR of each generation that has one."""
        self._work_dir: Path | None = None

    def staging(self, generation: int) -> Path:
        """Made by the first worker that has something for it."""
        return self.path / "staging" / f"generation_{generation:06d}"

    def temporary(self, generation: int) -> Path:
        """The workers' TMPDIR: what a killed one leaves in it goes with its generation."""
        if generation not in self._temporary:
            self._temporary[generation] = self.session.make_temporary()
        path, link = self._temporary[generation], self.session.temp_link
        return path if link is None else link / path.name

    def drop_temporary(self, generation: int) -> bool:
        """Its workers are gone: give their TMPDIR back if it is empty, as most are. False if it is not."""
        path = self._temporary.get(generation)
        if path is not None and not self.session.take_back(path):
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

    @property
    def output(self) -> Path:
        """Where the files that the user named are put together."""
        return self.path / "output"

    def log_file(self, generation: int, rank: int) -> Path:
        return self.logs / f"generation_{generation:06d}" / f"rank_{rank}.log"

    def error_file(self, generation: int, rank: int) -> Path:
        """Where scripts for torchrun leave their error. Nobody else reads it: it lies among the temporary files."""
        return self.temporary(generation) / f"error_{rank}.json"

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


def _remove(path: Path) -> None:
    try:
        path.rmdir()  # most are empty
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


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

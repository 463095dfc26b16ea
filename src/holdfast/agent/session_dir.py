"""The agent's own directory on its node: staged parts, logs and error files; gone when the agent is.

`<cache>/agents/<agent id>/`, with a file that names its owner by pid and start time. An agent that was killed
cannot clean up after itself: its zygote does so, and if that was killed too, the next agent on the node does.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from holdfast.storage.locate import local_cache_dir
from holdfast.worker.kinship import start_time

__all__ = ["SessionDir", "sweep_dead"]

_OWNER = "owner.json"


class SessionDir:
    """Where this agent keeps things. Created at once, removed by `remove`."""

    def __init__(self, agent: str, root: Path | None = None) -> None:
        agents = (root or local_cache_dir()) / "agents"
        agents.mkdir(parents=True, exist_ok=True)
        sweep_dead(agents)
        self.path = agents / agent
        if self.path.exists():
            raise FileExistsError(f"Another agent {agent} lives on this node: give this one another --agent-id.")
        # Named first, moved into place after: a directory without an owner would be swept.
        fresh = agents / f".{agent}.{os.getpid()}"
        fresh.mkdir()
        (fresh / _OWNER).write_text(json.dumps({"pid": os.getpid(), "start": start_time(os.getpid())}))
        fresh.rename(self.path)

    def staging(self, generation: int) -> Path:
        return self._made("staging", f"generation_{generation:06d}")

    def logs(self, generation: int) -> Path:
        return self._made("logs", f"generation_{generation:06d}")

    def error_file(self, generation: int, rank: int) -> Path:
        return self._made("errors", f"generation_{generation:06d}") / f"rank_{rank}.json"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _made(self, *parts: str) -> Path:
        path = self.path.joinpath(*parts)
        path.mkdir(parents=True, exist_ok=True)
        return path


def sweep_dead(agents: Path) -> list[str]:
    """Remove the directories of agents that no longer live; gives their names."""
    swept = []
    for directory in agents.iterdir():
        if not _lives(directory):
            shutil.rmtree(directory, ignore_errors=True)
            swept.append(directory.name)
    return swept


def _lives(directory: Path) -> bool:
    if directory.name.startswith("."):  # being made: by whom, its name says
        with suppress(ValueError):
            return start_time(int(directory.name.rpartition(".")[2])) is not None
    try:
        owner = json.loads((directory / _OWNER).read_text())
        return start_time(int(owner["pid"])) == int(owner["start"])
    except (OSError, ValueError, KeyError, TypeError):
        return False

"""The zygote's children: workers that it forked, and orphans of theirs that the kernel gave it.

A worker leads a process group of its own. When it dies, the rest of its group dies with it, before its pid can
be used again; what left the group is found as an orphan when the generation is cleared. `process_killing` says how, and
why resource trackers come last; `zygote` is the loop around this.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.linux.process import children, is_exiting
from holdfast.linux.process_killing import (
    end_children,
    is_resource_tracker,
    kill_children,
    kill_descendants,
    kill_group,
)

__all__ = ["Children", "Child", "Dead"]


@dataclass(frozen=True, slots=True)
class Child:
    """A worker's place in the run."""

    generation: int
    rank: int


class Dead(NamedTuple):
    """A child that was reaped."""

    pid: int
    child: Child | None
    """Who it was; None is an orphan, or a trial import."""
    status: int
    """As of wait(2)."""
    killed: bool
    """By us."""


class Children:
    """Which children live, and the ways to end them."""

    def __init__(self) -> None:
        self.workers: dict[int, Child] = {}
        self._killed: set[int] = set()
        self._own_children: list[int] = []

    def kill_workers(self) -> None:
        """Kill all workers and what they started. Those that were not exiting already count as killed by us."""
        self._killed = {pid for pid in self.workers if not is_exiting(pid)}
        kill_descendants(self.workers)

    def reap(self) -> list[Dead]:
        """Everyone who died since the last call."""
        dead = []
        while (found := _next_zombie()) is not None:
            child = self.workers.pop(found, None)
            if child is not None:
                kill_group(found)  # safe: a zombie keeps its pid, and with it the group's, until it is waited for
            _, status = os.waitpid(found, 0)
            dead.append(Dead(found, child, status, found in self._killed))
            self._killed.discard(found)
        return dead

    def keep_trackers(self) -> None:
        """Those resource trackers that there are now are the zygote's own: they end when it does, not with a
        generation."""
        self._own_children = children()  # one that was started a moment ago may have no command line yet

    def kill(self, spared: int | None = None) -> bool:
        """SIGKILL every child there is but the one that is `spared`. False when there was none left, not even a
        zombie."""
        return kill_children(self._spared(spared))

    def end(self, spared: int | None = None) -> None:
        """Kill and reap until nobody is left but the one that is `spared`."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kill_descendants(self.workers)
        end_children(self._spared(spared))
        self.workers.clear()

    def _spared(self, spared: int | None) -> set[int]:
        own_trackers = set(filter(is_resource_tracker, self._own_children))
        return own_trackers if spared is None else {spared, *own_trackers}


def _next_zombie() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid

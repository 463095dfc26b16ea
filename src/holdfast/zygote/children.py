"""The zygote's children: workers that it forked, and orphans of theirs that the kernel gave it.

A worker leads a session and a process group of its own. When it dies, the rest of its group dies with it, before its
pid can be used again; what left the group is found as an orphan when its run's generation is cleared. Which run an
orphan is of is known by its session, or by a variable that programs inherit; an orphan that is neither way known goes
when no other run has workers here. `process_killing` says how, and why resource trackers come last; `zygote` is the
loop around this.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.linux.process import children, environment_of, is_exiting
from holdfast.linux.process_killing import (
    end_children,
    is_resource_tracker,
    kill_all,
    kill_descendants,
    kill_group,
)
from holdfast.worker.environment import RUN_VARIABLE

__all__ = ["Children", "Child", "Dead"]


@dataclass(frozen=True, slots=True)
class Child:
    """A worker's run, and its place in it."""

    run: str
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
        self._counts: Counter[str] = Counter()
        """How many workers each run has."""
        self._sessions: dict[int, str] = {}
        """The run of each session that a worker led, until the run is cleared."""
        self._killed: set[int] = set()
        self._own_children: list[int] = []

    def add(self, pid: int, child: Child) -> None:
        """A worker was forked."""
        self.workers[pid] = child
        self._counts[child.run] += 1
        self._sessions[pid] = child.run

    def kill_workers(self, run: str) -> None:
        """Kill the run's workers and what they started. Those that were not exiting already count as killed by us."""
        doomed = [pid for pid, child in self.workers.items() if child.run == run]
        self._killed |= {pid for pid in doomed if not is_exiting(pid)}
        kill_descendants(doomed)

    def reap(self) -> list[Dead]:
        """Everyone who died since the last call."""
        dead = []
        while (found := _next_zombie()) is not None:
            child = self.workers.pop(found, None)
            if child is not None:
                self._counts[child.run] -= 1
                # Safe: a zombie keeps its pid, and with it the group's, until it is waited for. The other workers lead
                # groups of their own.
                kill_group(found, [pid for pid in children() if pid not in self.workers])
            _, status = os.waitpid(found, 0)
            dead.append(Dead(found, child, status, found in self._killed))
            self._killed.discard(found)
        return dead

    def keep_trackers(self) -> None:
        """Those resource trackers that there are now are the zygote's own: they end when it does, not with a
        generation."""
        self._own_children = children()  # one that was started a moment ago may have no command line yet

    def kill(self, run: str, spared: Collection[int]) -> bool:
        """SIGKILL every child that is the run's and not `spared`. False when there was none left, not even a zombie.

        While workers of the run live, which `kill_workers` has killed, nothing else is looked for."""
        if self._counts[run]:
            return True
        del self._counts[run]
        kept = {*spared, *self._own_trackers()}
        found = [pid for pid in children() if pid not in kept]
        if any(one != run for one in self._sessions.values()):
            found = [pid for pid in found if self._run_of(pid) == run]
        if kill_all(found):
            return True
        self._sessions = {session: one for session, one in self._sessions.items() if one != run}
        return False

    def end(self, spared: int | None = None) -> None:
        """Kill and reap until nobody is left but the one that is `spared`."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kill_descendants(self.workers)
        kept = {spared, *self._own_trackers()}
        end_children(lambda pid: pid in kept)
        self.workers.clear()
        self._counts.clear()

    def _own_trackers(self) -> set[int]:
        return set(filter(is_resource_tracker, self._own_children))

    def _run_of(self, pid: int) -> str | None:
        """The run that a child is of, if that is known."""
        if pid in self.workers:
            return self.workers[pid].run
        with suppress(ProcessLookupError):
            if (run := self._sessions.get(os.getsid(pid))) is not None:
                return run
        return environment_of(pid).get(RUN_VARIABLE)


def _next_zombie() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid

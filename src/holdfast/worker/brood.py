"""The zygote's children: workers that it forked, and orphans of theirs that the kernel gave it.

A worker leads a process group of its own. When it dies, the rest of its group dies with it, before its pid can
be used again; what left the group is found as an orphan when the generation is cleared. `zygote` is the loop
around this.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.worker.kinship import children, is_exiting, kill_group

__all__ = ["Brood", "Child", "Dead"]


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


class Brood:
    """Which children live, and the ways to end them."""

    def __init__(self) -> None:
        self.workers: dict[int, Child] = {}
        self._condemned: set[int] = set()

    def condemn(self) -> None:
        """Whoever of the workers is not dying already will die by our hand."""
        self._condemned = {pid for pid in self.workers if not is_exiting(pid)}

    def reap(self) -> list[Dead]:
        """Everyone who died since the last call."""
        dead = []
        while (found := _next_zombie()) is not None:
            child = self.workers.pop(found, None)
            if child is not None:
                kill_group(found)  # safe: a zombie keeps its pid, and with it the group's, until it is waited for
            _, status = os.waitpid(found, 0)
            dead.append(Dead(found, child, status, found in self._condemned))
            self._condemned.discard(found)
        return dead

    def kill(self, spared: int | None = None) -> bool:
        """SIGKILL every child there is but the one that is `spared`. False when there was none left, not even a
        zombie."""
        found = [pid for pid in children() if pid != spared]
        for pid in found:
            if pid in self.workers:
                kill_group(pid)
            else:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return bool(found)

    def end(self, spared: int | None = None) -> None:
        """Kill and reap until nobody is left but the one that is `spared`: each death may turn grandchildren into
        children."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while self.kill(spared):
            with suppress(ChildProcessError):
                pid, _ = os.waitpid(-1, 0)
                self.workers.pop(pid, None)


def _next_zombie() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid

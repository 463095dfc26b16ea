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

from holdfast.worker.kinship import children, kill_group

__all__ = ["Brood", "Child"]


@dataclass(frozen=True, slots=True)
class Child:
    """A worker's place in the run."""

    generation: int
    rank: int


class Brood:
    """Which children live, and the ways to end them."""

    def __init__(self) -> None:
        self.workers: dict[int, Child] = {}

    def reap(self) -> list[tuple[int, Child | None, int]]:
        """Everyone who died since the last call: pid, who it was (None: an orphan, or a trial import), wait status."""
        dead = []
        while (found := _next_zombie()) is not None:
            child = self.workers.pop(found, None)
            if child is not None:
                kill_group(found)  # safe: a zombie keeps its pid, and with it the group's, until it is waited for
            _, status = os.waitpid(found, 0)
            dead.append((found, child, status))
        return dead

    def kill(self) -> bool:
        """SIGKILL every child there is. False when there was none left, not even a zombie."""
        found = children()
        for pid in found:
            if pid in self.workers:
                kill_group(pid)
            else:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return bool(found)

    def end(self) -> None:
        """Kill and reap until nobody is left: each death may turn grandchildren into children."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while self.kill():
            with suppress(ChildProcessError):
                pid, _ = os.waitpid(-1, 0)
                self.workers.pop(pid, None)


def _next_zombie() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid

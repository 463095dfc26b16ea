"""Trial imports: a module that workers imported by themselves is first imported in a child of the zygote.

A trial that starts threads, opens a device, crashes, exits or hangs harms nobody; only what passed is then imported by
the process that will be the next zygote (`next_zygote`). A batch that fails is halved, so that one bad module does not
keep out the rest. A trial yields to the workers, so on a busy machine it may take a while; the framework's own packages
are taken on trust.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import NoReturn

from holdfast.worker.job_loader import import_quietly
from holdfast.zygote.fork_safety import one_thread_each, unsafe_reason

__all__ = ["ImportTrial"]


class ImportTrial:
    """Which modules are yet to be tried, which passed. The zygote forks the trial's process."""

    def __init__(self) -> None:
        self.trial_pid: int | None = None
        self._trusted: frozenset[str] = frozenset()
        self._seen: set[str] = set()
        self._untried: deque[list[str]] = deque()
        self._on_trial: list[str] = []
        self._safe: deque[str] = deque()

    @property
    def idle(self) -> bool:
        """Nothing can be done right now."""
        return not self._safe and (self.trial_pid is not None or not self._untried)

    def trust(self, modules: list[str]) -> None:
        """What lies in these packages needs no trial: they were asked for by name, and did no harm so far."""
        self._trusted = frozenset(map(_package, modules))

    def add(self, modules: list[str]) -> None:
        new = [name for name in modules if name not in self._seen and name not in sys.modules]
        self._seen.update(new)
        self._safe.extend(name for name in new if _package(name) in self._trusted)
        if strange := [name for name in new if _package(name) not in self._trusted]:
            self._untried.append(strange)

    def pop_safe(self) -> list[str]:
        """The modules that passed their trial since the last call."""
        safe, self._safe = list(self._safe), deque()
        return safe

    @property
    def untried(self) -> list[str]:
        """The modules that have not passed or failed a trial yet."""
        return [*self._on_trial, *(name for batch in self._untried for name in batch)]

    def restart(self, untried: list[str]) -> None:
        """In the next zygote: these are yet to be tried; a trial that the former one had begun is not this one's."""
        self.trial_pid = None
        self._on_trial = []
        self._untried.clear()
        self._safe.clear()
        self._seen.difference_update(untried)
        self.add(untried)

    def start_trial(self) -> bool:
        """Begin the next batch; False if there is none, or a trial is running."""
        if self.trial_pid is not None or not self._untried:
            return False
        self._on_trial = self._untried.popleft()
        return True

    def run_trial(self) -> NoReturn:
        """In the forked child: import the batch; the exit code is 0 if that was safe."""
        code = 1
        try:
            os.nice(19)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)
            with one_thread_each():
                for name in self._on_trial:
                    import_quietly(name)
            code = 0 if unsafe_reason("It") is None else 1
        finally:
            os._exit(code)

    def trial_ended(self, status: int) -> None:
        self.trial_pid = None
        batch, self._on_trial = self._on_trial, []
        if status == 0:
            self._safe.extend(batch)
        elif len(batch) > 1:
            middle = len(batch) // 2
            self._untried.extend([batch[:middle], batch[middle:]])


def _package(module: str) -> str:
    return module.partition(".")[0]

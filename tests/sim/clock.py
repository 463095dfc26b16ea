"""Virtual time: a heap of things to do, one source of chance, and a trace for people.

Everything in the simulator happens in a callback of `Clock.at`, so a seed decides the whole run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

__all__ = ["Clock", "Violation"]


class Violation(AssertionError):
    """A promise was broken."""


class Clock:
    """Runs callbacks in order of their time; those of the same time in the order in which they were asked for."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.tracing = trace
        self.steps = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, action, *arguments)

    def run(self, is_over: Callable[[], bool], until_s: float, steps_max: int = 60_000) -> bool:
        """Until `is_over`, or time or patience is up; True if it was over in time."""
        while self._heap and not is_over():
            when, _, action, arguments = heapq.heappop(self._heap)
            self.steps += 1
            if when > until_s or self.steps > steps_max:
                return False
            self.now = when
            action(*arguments)
        return is_over()

    def delay_s(self, typical_s: float) -> float:
        """A delay: mostly near what is typical, sometimes none, now and then ten times as long."""
        roll = self.chance.random()
        if roll < 0.1:
            return 0.0
        if roll > 0.97:
            return typical_s * 10 * self.chance.random()
        return typical_s * (0.5 + self.chance.random())

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.chance.random() < probability

    def say(self, who: str, text: str, *arguments: Any) -> None:
        if self.tracing:
            print(f"{self.now:9.3f}  {who:<14} {text % arguments if arguments else text}")

"""Measuring ourselves and others in the same run, so that what is printed are ratios and not one machine's figures.

Contenders take turns (A B C A B C ...), each from the same settled state, and the median of each counts. `store` and
the other benchmarks say what is measured; this says how, and how it is shown.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Aim", "Contender", "Section", "print_section", "race", "settle"]


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be timed. `work` is what counts; `before` and `after` make room for it and tidy up, untimed."""

    name: str
    work: Callable[[], object]
    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Aim:
    """`ours / peer` should be at most this."""

    peer: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Section:
    """One comparison: the first contender is ours, the others are what it is compared with."""

    title: str
    contenders: Sequence[Contender]
    aims: Sequence[Aim] = ()


def race(section: Section, rounds: int, settle_at: Path) -> dict[str, float]:
    """Seconds of each contender: the median of `rounds`, after one round that warms everything up."""
    taken: dict[str, list[float]] = {contender.name: [] for contender in section.contenders}
    for number in range(rounds + 1):
        for contender in section.contenders:
            _say(f"{section.title}: round {number} of {rounds}, {contender.name}")
            with _prepared(contender, settle_at):
                started_s = time.perf_counter()
                contender.work()
                elapsed_s = time.perf_counter() - started_s
            if number:
                taken[contender.name].append(elapsed_s)
    _say("")
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def print_section(section: Section, medians: dict[str, float], moved_bytes: int) -> bool:
    """The table of one comparison; returns whether every aim was met."""
    aims = {aim.peer: aim.ratio for aim in section.aims}
    ours_s = medians[section.contenders[0].name]
    print(f"\n{section.title}")
    all_met = True
    for contender in section.contenders:
        seconds = medians[contender.name]
        line = f"  {contender.name:<34}{seconds:8.3f} s {moved_bytes / seconds / 1024**2:8.0f} MiB/s"
        if contender is not section.contenders[0]:
            ratio = ours_s / seconds
            line += f"   ours/this {ratio:5.2f}"
            if (aim := aims.get(contender.name)) is not None:
                met = ratio <= aim
                all_met = all_met and met
                line += f"   aim <= {aim:.2f}: {'met' if met else 'MISSED'}"
        print(f"{line}   {contender.note}".rstrip())
    return all_met


def settle(directory: Path) -> None:
    """Wait until everything written to this file system is on its disk, so that nobody pays for the one before."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(directory))
    finally:
        os.close(handle)


@contextmanager
def _prepared(contender: Contender, settle_at: Path) -> Iterator[None]:
    if contender.before is not None:
        contender.before()
    settle(settle_at)
    try:
        yield
    finally:
        if contender.after is not None:
            contender.after()


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

"""How often results and commits are shown: each one while they come slowly, the latest of many when they do not.

A result waits a moment for the name of its checkpoint, which its table shows; a commit is shown after its result.
`terminal` asks after every record and every second what is due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.curve import Row
from holdfast.core.records import CheckpointCommitted

__all__ = ["Due", "Throttle"]

_NAME_WAIT_S = 1.0
_SLOWEST_S = 10.0


class Due(NamedTuple):
    """What to show now, and how many of its kind were passed over since the last one."""

    row: Row | None
    rows_skipped: int
    commit: CheckpointCommitted | None
    commits_skipped: int


class Throttle:
    """Four results a second where someone is looking, one otherwise; ever fewer while many are passed over."""

    def __init__(self, interactive: bool, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._interval_s = 0.25 if interactive else 1.0
        self._row: Row | None = None
        self._row_skipped = 0
        self._name_until = 0.0
        self._row_after = self._commit_after = float("-inf")
        self._commit: CheckpointCommitted | None = None
        self._commit_skipped = 0

    def report(self, row: Row, *, waits: bool) -> None:
        """A result to show; `waits` if a checkpoint came with it whose name is not known yet."""
        if self._row is not None:
            self._row_skipped += 1
        self._row = row
        self._name_until = self._clock() + _NAME_WAIT_S if waits else float("-inf")

    def set_checkpoint(self, iteration: int, name: str | None) -> None:
        """The checkpoint of that iteration has this name, or will have none."""
        if self._row is not None and self._row.iteration == iteration:
            self._row.checkpoint = name
            self._name_until = float("-inf")

    def commit(self, record: CheckpointCommitted) -> None:
        self.set_checkpoint(record.iteration, record.name)
        if self._commit is not None:
            self._commit_skipped += 1
        self._commit = record

    def due(self, *, everything: bool = False) -> Due | None:
        """What is to be shown now, if anything; it then counts as shown."""
        if self._row is None and self._commit is None:
            return None
        now = self._clock()
        row, rows_skipped = None, self._row_skipped
        if self._row is not None and (
            everything or (now >= self._row_after + self._pause_s(rows_skipped, now) and now >= self._name_until)
        ):
            row, self._row, self._row_skipped, self._row_after = self._row, None, 0, now
        commit, commits_skipped = None, self._commit_skipped
        if self._commit is not None and (
            everything
            or (
                now >= self._commit_after + self._pause_s(commits_skipped, now)
                and (self._row is None or self._row.iteration > self._commit.iteration)
            )
        ):
            commit, self._commit, self._commit_skipped, self._commit_after = self._commit, None, 0, now
        return Due(row, rows_skipped, commit, commits_skipped) if row or commit else None

    def _pause_s(self, skipped: int, now: float) -> float:
        """While many are passed over: a hundredth of the time so far, that a long log stays short."""
        if not skipped:
            return self._interval_s
        return min(_SLOWEST_S, max(1.0, self._interval_s, (now - self._began) / 100))

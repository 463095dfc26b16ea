"""Which reports become a line: each one while they come slowly, the latest of many when they do not.

A report waits a moment for the name of its checkpoint, which its line shows; reports behind it wait with it. On a
terminal with a live line, which shows every report, only those stay that took long, and the last one before the run
ends. `terminal` asks after every record and several times a second what is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.curve import Row
from holdfast.core.records import CheckpointCommitted

__all__ = ["Due", "Throttle"]

_NAME_WAIT_S = 1.0
_BURST = 20
"""So many reports are shown at first, however fast they come: a short run is shown whole."""
_INTERVAL_S = 1.0
_SLOWEST_S = 10.0
_LONG_S = 5.0


class Due(NamedTuple):
    """A line to show: a report, how many were passed over before it, and the newest commit that was not shown."""

    row: Row | None
    skipped: int
    commit: CheckpointCommitted | None


class Throttle:
    """One line a second after the first few; ever fewer while many are passed over."""

    def __init__(self, live: bool, clock: Callable[[], float]) -> None:
        self._live = live
        self._clock = clock
        self._began = clock()
        self._waiting: deque[tuple[Row, float]] = deque()
        """Each with the time until which it waits for the name of its checkpoint."""
        self._next: Row | None = None
        self._skipped = 0
        self._burst = _BURST
        self._after = float("-inf")
        self._commit: tuple[CheckpointCommitted, float] | None = None

    def report(self, row: Row, *, waits: bool) -> None:
        """A report; `waits` if a checkpoint came with it that is not committed yet."""
        if self._live and row.this_s < _LONG_S:
            self._next = row
        else:
            self._waiting.append((row, self._clock() + _NAME_WAIT_S if waits else float("-inf")))

    def commit(self, record: CheckpointCommitted) -> None:
        if not self._live or self._waiting:
            self._commit = (record, self._clock())
        self.stop_waiting(record.iteration)

    def stop_waiting(self, iteration: int) -> None:
        """The checkpoint of this iteration is committed, or will not be."""
        self._waiting = deque(
            (row, float("-inf") if row.iteration <= iteration else until) for row, until in self._waiting
        )

    @property
    def is_waiting(self) -> bool:
        """Whether something will be due although nothing more comes; with a live line, a last report is only at the
        end."""
        if self._live and self._next is not None:
            return bool(self._waiting)
        return bool(self._waiting) or self._commit is not None or self._next is not None

    def due(self, *, everything: bool = False) -> list[Due]:
        """What is to be shown now; it then counts as shown."""
        lines: list[Due] = []
        if not self._waiting and self._next is None and self._commit is None:
            return lines
        now = self._clock()
        while self._waiting and (everything or now >= self._waiting[0][1]):
            row, _ = self._waiting.popleft()
            if self._burst or self._live:
                lines.append(self._show(row, now))
            else:
                self._skipped += self._next is not None
                self._next = row
        if self._next is not None and (everything or (not self._live and now >= self._after + self._pause_s(now))):
            lines.append(self._show(self._next, now))
        if self._commit is not None and self._next is None and not self._waiting:
            record, since = self._commit
            if everything or now >= since + _NAME_WAIT_S:
                self._commit = None
                lines.append(Due(None, 0, record))
        return lines

    def _show(self, row: Row, now: float) -> Due:
        commit = None
        if self._commit is not None and self._commit[0].iteration <= row.iteration:
            (commit, _), self._commit = self._commit, None
        due = Due(row, self._skipped, commit)
        if self._next is not None and self._next.iteration <= row.iteration:
            self._next = None
        self._skipped, self._after = 0, now
        self._burst = max(0, self._burst - 1)
        return due

    def _pause_s(self, now: float) -> float:
        """While many are passed over: a hundredth of the time so far, that a long log stays short."""
        if not self._skipped:
            return _INTERVAL_S
        return min(_SLOWEST_S, max(_INTERVAL_S, (now - self._began) / 100))

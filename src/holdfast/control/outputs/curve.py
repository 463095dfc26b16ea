"""The effective curve of a run: the reports that count, with the times that each iteration took.

A generation that starts from an earlier iteration supersedes what was reported after it; that time is counted as if it
had not been spent, so `time_total_s` goes on from the checkpoint. `results` writes the curve, `control.terminal`
shows it. Memory: 16 bytes a report.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from holdfast.core.records import GenerationRunning, GenerationStarted, Record, Reported

__all__ = ["Curve", "Row"]


@dataclass(slots=True)
class Row:
    """One report that counts."""

    iteration: int
    at: float
    metrics: dict[str, Any]
    this_s: float
    total_s: float
    checkpoint: str | None = None
    """Name of the checkpoint that was committed with it, once known."""


class Curve:
    """Fed with every record in order."""

    def __init__(self) -> None:
        self._iterations: array[int] = array("q")
        self._totals_s: array[float] = array("d")
        self._since: float | None = None
        self._started = False

    def __len__(self) -> int:
        return len(self._iterations)

    @property
    def total_s(self) -> float:
        """Time spent on training that was kept."""
        return self._totals_s[-1] if self._totals_s else 0.0

    def take(self, record: Record) -> Row | None:
        """The row that a report makes; None for every other record. A rollback makes the curve shorter."""
        if isinstance(record, Reported):
            return self._report(record)
        if isinstance(record, GenerationStarted):
            kept = bisect_right(self._iterations, record.iteration)
            del self._iterations[kept:]
            del self._totals_s[kept:]
            self._since, self._started = record.at, False
        elif isinstance(record, GenerationRunning) and not self._started:
            self._since = record.at
        return None

    def _report(self, record: Reported) -> Row:
        # Reports carry the worker's clock, generations the controller's: a little skew must not give negative times.
        this_s = max(0.0, record.at - self._since) if self._since is not None else 0.0
        total_s = self.total_s + this_s
        self._since, self._started = record.at, True
        self._iterations.append(record.iteration)
        self._totals_s.append(total_s)
        return Row(record.iteration, record.at, record.metrics, this_s, total_s)

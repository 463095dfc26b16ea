"""The effective curve of a run: how many reports count, the last of them, and the training time that was kept.

A generation that starts from an earlier iteration supersedes what was reported after it; that time is counted as if it
had not been spent, so `total_s` goes on from the checkpoint. A run goes back only to checkpoints, so the curve is
remembered at those and nowhere else: memory does not grow with the number of reports. The result files, the terminal,
`Result` and the journal's fold all use this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.core import records as r

__all__ = ["Curve", "CurvePoint", "Row"]


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


class CurvePoint(msgspec.Struct, frozen=True):
    """The curve as it was after one report: how many count up to it, and what it said."""

    iteration: int = 0
    rows: int = 0
    total_s: float = 0.0
    at: float = 0.0
    metrics: dict[str, Any] | None = None


@dataclass(slots=True)
class Curve:
    """Fed with every record in order."""

    last: CurvePoint = field(default_factory=CurvePoint)
    marks: list[CurvePoint] = field(default_factory=list)
    """By iteration: the reports to which the run may go back."""
    checkpoints: dict[str, int] = field(default_factory=dict)
    """Iterations of the committed checkpoints that are left."""
    since: float | None = None
    reported: bool = False
    """Whether this generation has reported."""

    def __len__(self) -> int:
        return self.last.rows

    @property
    def total_s(self) -> float:
        """Time spent on training that was kept."""
        return self.last.total_s

    def take(self, record: r.Record) -> Row | None:
        """The row that a report makes; None for every other record. A rollback makes the curve shorter."""
        match record:
            case r.Reported():
                return self._report(record)
            case r.GenerationStarted():
                self._go_back(record.iteration)
                self.since, self.reported = record.at, False
            case r.GenerationRunning():
                if not self.reported:
                    self.since = record.at
            case r.CheckpointCommitted():
                self.checkpoints[record.name] = record.iteration
                self._mark_commit(record)
            case r.CheckpointAbandoned():
                self._forget(record.iteration)
            case r.CheckpointDeleted() | r.CheckpointDamaged():
                if (iteration := self.checkpoints.pop(record.name, None)) is not None:
                    self._forget(iteration)
            case r.RunRestarted():
                self.last = CurvePoint()
                self.marks.clear()
                self.checkpoints.clear()
        return None

    def _report(self, record: r.Reported) -> Row:
        if record.iteration <= self.last.iteration:
            self._go_back(record.iteration - 1)  # the record of the rollback was lost
        # Reports carry the worker's clock, generations the controller's: a little skew must not give negative times.
        this_s = max(0.0, record.at - self.since) if self.since is not None else 0.0
        total_s = self.last.total_s + this_s
        self.since, self.reported = record.at, True
        self.last = CurvePoint(record.iteration, self.last.rows + 1, total_s, record.at, record.metrics)
        if record.checkpoint:
            self.marks.append(self.last)
        return Row(record.iteration, record.at, record.metrics, this_s, total_s)

    def _go_back(self, iteration: int) -> None:
        if self.last.iteration <= iteration:
            return
        self.last = self._at(iteration)
        while self.marks and self.marks[-1].iteration > iteration:
            self.marks.pop()

    def _at(self, iteration: int) -> CurvePoint:
        """The curve at an iteration: as it was remembered, or else between what was remembered around it."""
        before, after = CurvePoint(), self.last
        for mark in reversed(self.marks):
            if mark.iteration <= iteration:
                before = mark
                break
            after = mark
        if before.iteration == iteration:
            return before
        done = iteration - before.iteration
        share = done / max(1, after.iteration - before.iteration)
        total_s = before.total_s + (after.total_s - before.total_s) * share
        return CurvePoint(iteration, min(self.last.rows, before.rows + done), total_s, before.at, before.metrics)

    def _mark_commit(self, record: r.CheckpointCommitted) -> None:
        """Commits of a controller that was lost are found later: its report may have been forgotten by then."""
        if not 0 < record.iteration <= self.last.iteration or any(
            mark.iteration == record.iteration for mark in reversed(self.marks)
        ):
            return
        found = self._at(record.iteration)
        point = CurvePoint(record.iteration, found.rows, found.total_s, found.at, record.metrics)
        self.marks.append(point)
        self.marks.sort(key=lambda mark: mark.iteration)

    def _forget(self, iteration: int) -> None:
        if iteration not in self.checkpoints.values():
            self.marks = [mark for mark in self.marks if mark.iteration != iteration]

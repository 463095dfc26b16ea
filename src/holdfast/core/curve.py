"""The effective curve of a run: the reports that count, and the training that was kept with them.

A generation that starts from an earlier iteration supersedes what was reported after it. This is the one place that
takes superseded reports back: `Curve.apply` returns what a record changed, and every view follows that. Superseded
time is counted as if it had not been spent, so `total_s` goes on from the checkpoint. A run goes back only to
checkpoints, so the curve is remembered at those and nowhere else: memory does not grow with the number of reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from holdfast.core import records as r

__all__ = ["Change", "Curve", "CurvePoint", "Row", "effective_reports"]


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


class Change(NamedTuple):
    """What a record changed: reports beyond `kept_iteration` no longer count, and `row` was added."""

    row: Row | None
    kept_iteration: int
    kept_rows: int
    """How many reports count without `row`."""
    lost_iterations: int = 0
    lost_s: float = 0.0
    """The training that is superseded."""


class CurvePoint(msgspec.Struct, frozen=True):
    """The curve as it was after one report: how many count up to it, and its metrics."""

    iteration: int = 0
    rows: int = 0
    total_s: float = 0.0
    at: float = 0.0
    metrics: dict[str, Any] | None = None
    trained_s: float = 0.0
    """Training up to here, without stalls, as `accounting` measures it."""


@dataclass(slots=True)
class Curve:
    """Fed with every record in order."""

    last: CurvePoint = field(default_factory=CurvePoint)
    origin: CurvePoint = field(default_factory=CurvePoint)
    """Iteration 0. Its `trained_s` is what was trained before the run's last restart, which no rollback reaches."""
    marks: list[CurvePoint] = field(default_factory=list)
    """By iteration: the reports to which the run may go back."""
    checkpoints: dict[str, int] = field(default_factory=dict)
    """Iterations of the committed checkpoints that are left."""
    since: float | None = None
    reported: bool = False
    """Whether this generation has reported."""

    def __len__(self) -> int:
        return self.last.rows

    def apply(self, record: r.Record, trained_s: float = 0.0) -> Change:
        """Bring the curve up to date with one record; a report ends `trained_s` of training."""
        before = self.last
        match record:
            case r.Reported():
                if record.iteration > before.iteration:
                    return Change(self._add(record, trained_s), before.iteration, before.rows)
                self._go_back(record.iteration - 1)  # the record of the rollback was lost
                kept = self.last
                return _change(before, kept, self._add(record, trained_s))
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
                self.origin = self.last = before = CurvePoint(trained_s=before.trained_s)
                self.marks.clear()
                self.checkpoints.clear()
        return _change(before, self.last, None)

    def at(self, iteration: int) -> CurvePoint:
        """The curve at an earlier iteration: as it was remembered, or else between what was remembered around it."""
        before, after = self.origin, self.last
        for mark in reversed(self.marks):
            if mark.iteration <= iteration:
                before = mark
                break
            after = mark
        if before.iteration == iteration:
            return before
        done = iteration - before.iteration
        share = done / max(1, after.iteration - before.iteration)
        return CurvePoint(
            iteration,
            min(self.last.rows, before.rows + done),
            before.total_s + (after.total_s - before.total_s) * share,
            before.at,
            before.metrics,
            before.trained_s + (after.trained_s - before.trained_s) * share,
        )

    def _add(self, record: r.Reported, trained_s: float) -> Row:
        # Reports carry the worker's clock, generations the controller's: a little skew must not give negative times.
        this_s = max(0.0, record.at - self.since) if self.since is not None else 0.0
        last = self.last
        total_s = last.total_s + this_s
        self.since, self.reported = record.at, True
        self.last = CurvePoint(
            record.iteration, last.rows + 1, total_s, record.at, record.metrics, last.trained_s + trained_s
        )
        if record.checkpoint:
            self.marks.append(self.last)
        return Row(record.iteration, record.at, record.metrics, this_s, total_s)

    def _go_back(self, iteration: int) -> None:
        if self.last.iteration <= iteration:
            return
        self.last = self.at(iteration)
        while self.marks and self.marks[-1].iteration > iteration:
            self.marks.pop()

    def _mark_commit(self, record: r.CheckpointCommitted) -> None:
        """Commits of a controller that was lost are found later: its report may have been forgotten by then."""
        if not 0 < record.iteration <= self.last.iteration or any(
            mark.iteration == record.iteration for mark in reversed(self.marks)
        ):
            return
        found = self.at(record.iteration)
        self.marks.append(msgspec.structs.replace(found, iteration=record.iteration, metrics=record.metrics))
        self.marks.sort(key=lambda mark: mark.iteration)

    def _forget(self, iteration: int) -> None:
        if iteration not in self.checkpoints.values():
            self.marks = [mark for mark in self.marks if mark.iteration != iteration]


def effective_reports(records: Iterable[r.Record]) -> list[r.Reported]:
    """The reports that count after every rollback, in order of iteration."""
    curve = Curve()
    reports: list[r.Reported] = []
    for record in records:
        kept_iteration = curve.apply(record).kept_iteration
        while reports and reports[-1].iteration > kept_iteration:
            reports.pop()
        if isinstance(record, r.Reported):
            reports.append(record)
    return reports


def _change(before: CurvePoint, kept: CurvePoint, row: Row | None) -> Change:
    lost_iterations, lost_s = before.iteration - kept.iteration, before.trained_s - kept.trained_s
    return Change(row, kept.iteration, kept.rows, lost_iterations, lost_s)

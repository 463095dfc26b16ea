"""Where a run's time went, from its records alone: what was training, what of it was kept, and what the faults cost.

Every second between the first and the last record falls into one bucket of `Account`. Time is attributed when the next
record comes; training stays on a stack until a later generation takes it back, so one record costs O(1) on average
and a run that goes on can be watched. `narrative` and the views for people use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from holdfast.core import records as r
from holdfast.core.root_cause import root_cause

__all__ = ["Account", "Accountant", "EffectiveReports", "Recovery", "account", "effective_reports"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One failure that the run got over: what died, what was lost, how long it took."""

    generation: int
    """The generation that failed."""
    cause: r.WorkerFailure | None
    """The root cause; None where the journal names no rank."""
    why: str
    ranks: tuple[int, ...]
    """All that failed, whether of themselves or with the one that is to blame."""
    lost_iterations: int
    elapsed_s: float
    """From the moment the failure was noticed until every new worker ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Seconds by what they were spent on; they add up to `wall_s`."""

    start_up_s: float = 0.0
    """From a controller's start until its first workers ran."""
    training_kept_s: float = 0.0
    training_lost_s: float = 0.0
    """Training that a failure or a restart took back."""
    stall_s: float = 0.0
    """Training waited inside `report`."""
    recovery_s: float = 0.0
    """Noticing is over, work has not begun again: stopping, starting, loading."""
    waiting_s: float = 0.0
    """Between two generations: backing off, waiting for agents or for uploads."""
    down_s: float = 0.0
    """No controller, or one that was shutting down."""
    lost_iterations: int = 0
    recoveries: tuple[Recovery, ...] = ()

    @property
    def wall_s(self) -> float:
        training_s = self.training_kept_s + self.training_lost_s + self.stall_s
        return training_s + self.start_up_s + self.recovery_s + self.waiting_s + self.down_s

    @property
    def goodput(self) -> float | None:
        """Share of the wall time spent on training that was kept, 0 to 1; None before any time has passed."""
        return self.training_kept_s / self.wall_s if self.wall_s > 0 else None


@dataclass(slots=True)
class _Stretch:
    """Training from iteration `first` to `last` that still counts."""

    first: int
    last: int
    seconds: float
    sealed: bool
    """Ends at a checkpoint, to which the run may go back, or where an earlier generation ended."""


@dataclass(slots=True)
class _Failure:
    ended: r.GenerationEnded
    lost_iterations: int = 0


@dataclass(slots=True)
class Accountant:
    """Takes a journal's records one by one; `account` may be read at any time."""

    _phase: str = "down"
    _cursor: float | None = None
    _spent: dict[str, float] = field(default_factory=dict)
    _tail_s: float = 0.0
    """Training since the last report."""
    _stretches: list[_Stretch] = field(default_factory=list)
    _committed: int = 0
    """The iteration to which the run would go back if it died now."""
    _lost_iterations: int = 0
    _failures: list[_Failure] = field(default_factory=list)
    _recoveries: list[Recovery] = field(default_factory=list)
    _checkpoints: dict[str, int] = field(default_factory=dict)
    """Iterations of the committed checkpoints that are left."""

    @property
    def account(self) -> Account:
        return Account(
            start_up_s=self._spent.get("start_up", 0.0),
            training_kept_s=self._spent.get("kept", 0.0) + self._tail_s,
            training_lost_s=self._spent.get("lost", 0.0),
            stall_s=self._spent.get("stall", 0.0),
            recovery_s=self._spent.get("recovery", 0.0),
            waiting_s=self._spent.get("waiting", 0.0),
            down_s=self._spent.get("down", 0.0),
            lost_iterations=self._lost_iterations,
            recoveries=tuple(self._recoveries),
        )

    def take(self, record: r.Record) -> None:
        """One more record of the journal, in order."""
        match record:
            case r.Reported():
                self._pass(record.at)
                self._report(record)
            case r.ControllerStarted():
                self._leave("down")  # whoever had the run before is gone since its last record
                self._pass(record.at)
                self._phase = "start_up"
                self._failures.clear()
            case r.RunRestarted():
                self._pass(record.at)
                self._checkpoints.clear()
                self._stretches.clear()  # what was trained before it stays kept: no later rollback reaches it
                self._committed = 0
            case r.GenerationStarted():
                self._pass(record.at)
                self._phase = "recovery" if self._phase == "waiting" else self._phase
                self._go_back(record.iteration)
            case r.GenerationRunning():
                self._pass(record.at)
                self._phase = "training"
                self._recover(record)
            case r.GenerationEnded():
                self._end(record)
            case r.RunFinished():
                self._pass(record.at)
                self._add("kept", self._tail_s)
                self._tail_s, self._phase = 0.0, "down"
            case r.RunFailed() | r.RunInterrupted():
                self._pass(record.at)
                self._leave("down")
                self._go_back(self._committed)
            case r.CheckpointCommitted():
                self._pass(record.at)
                self._committed = record.iteration
                self._checkpoints[record.name] = record.iteration
            case r.CheckpointAbandoned():
                self._pass(record.at)
                self._unseal(record.iteration)
            case r.CheckpointDeleted() | r.CheckpointDamaged():
                self._pass(record.at)
                if (iteration := self._checkpoints.pop(record.name, None)) is not None:
                    self._unseal(iteration)
            case _:
                self._pass(record.at)

    def _pass(self, until: float) -> None:
        """Time passed in the present phase. Clocks of other machines may be off: it never runs backwards."""
        if self._cursor is None:
            self._cursor = until
        seconds = max(0.0, until - self._cursor)
        self._cursor += seconds
        if self._phase == "training":
            self._tail_s += seconds
        else:
            self._add(self._phase, seconds)

    def _add(self, bucket: str, seconds: float) -> None:
        self._spent[bucket] = self._spent.get(bucket, 0.0) + seconds

    def _leave(self, phase: str) -> None:
        """Work that was not reported is lost with the workers that did it."""
        self._add("lost", self._tail_s)
        self._tail_s, self._phase = 0.0, phase

    def _report(self, record: r.Reported) -> None:
        stall_s = min(record.stall_s, self._tail_s)
        self._add("stall", stall_s)
        seconds, self._tail_s = self._tail_s - stall_s, 0.0
        self._add("kept", seconds)
        top = self._stretches[-1] if self._stretches else None
        if top is not None and not top.sealed and top.last + 1 == record.iteration:
            top.last, top.sealed = record.iteration, record.checkpoint
            top.seconds += seconds
        else:
            self._stretches.append(_Stretch(record.iteration, record.iteration, seconds, record.checkpoint))

    def _unseal(self, iteration: int) -> None:
        """The run cannot go back to this iteration any more: what came after it is one stretch with what came before.
        Without this there would be a stretch for every checkpoint that ever was."""
        if iteration in self._checkpoints.values():
            return
        for n in range(len(self._stretches) - 1, -1, -1):
            if self._stretches[n].last <= iteration:
                break
        else:
            return
        one = self._stretches[n]
        if one.last != iteration or not one.sealed:
            return
        one.sealed = False
        if n + 1 < len(self._stretches) and self._stretches[n + 1].first == iteration + 1:
            following = self._stretches.pop(n + 1)
            one.last, one.sealed = following.last, following.sealed
            one.seconds += following.seconds

    def _end(self, record: r.GenerationEnded) -> None:
        self._pass(min(record.detected_at, record.at))
        failed = record.counted or bool(record.failures)
        self._leave("recovery" if failed else "down")
        self._pass(record.at)
        if failed:
            self._phase = "waiting"
            self._failures.append(_Failure(record))

    def _go_back(self, iteration: int) -> None:
        """Training beyond the iteration from which the run goes on is lost."""
        self._committed = iteration
        lost = 0
        while self._stretches and self._stretches[-1].last > iteration:
            top = self._stretches.pop()
            beyond = top.last - max(iteration, top.first - 1)
            lost += beyond
            lost_s = top.seconds * beyond / (top.last - top.first + 1)
            self._add("lost", lost_s)
            self._add("kept", -lost_s)
            if top.first <= iteration:
                self._stretches.append(_Stretch(top.first, iteration, top.seconds - lost_s, True))
        if self._stretches:
            self._stretches[-1].sealed = True
        self._lost_iterations += lost
        if self._failures:
            self._failures[-1].lost_iterations = lost

    def _recover(self, record: r.GenerationRunning) -> None:
        for failure in self._failures:
            ended = failure.ended
            self._recoveries.append(
                Recovery(
                    generation=ended.generation,
                    cause=_brief(root_cause(ended.failures)) if ended.failures else None,
                    why=ended.why,
                    ranks=tuple(sorted(one.rank for one in ended.failures)),
                    lost_iterations=failure.lost_iterations,
                    elapsed_s=max(0.0, record.at - ended.detected_at),
                )
            )
        self._failures.clear()


def _brief(failure: r.WorkerFailure) -> r.WorkerFailure:
    """Without what is long: recoveries are kept for as long as the run lives."""
    return structs.replace(failure, traceback=None, last_lines=())


class EffectiveReports:
    """The reports that count, as records come in: a new generation takes back those beyond its start, and a
    restart begins a new curve."""

    def __init__(self) -> None:
        self.rows: list[r.Reported] = []

    def take(self, record: r.Record) -> None:
        if isinstance(record, r.Reported):
            while self.rows and self.rows[-1].iteration >= record.iteration:
                self.rows.pop()  # the record of the rollback was lost
            self.rows.append(record)
        elif isinstance(record, r.GenerationStarted):
            while self.rows and self.rows[-1].iteration > record.iteration:
                self.rows.pop()
        elif isinstance(record, r.RunRestarted):
            self.rows.clear()


def account(records: Iterable[r.Record]) -> Account:
    """Where the time of a whole journal went."""
    accountant = Accountant()
    for record in records:
        accountant.take(record)
    return accountant.account


def effective_reports(records: Iterable[r.Record]) -> list[r.Reported]:
    """The reports that count after every rollback, in order of iteration."""
    reports = EffectiveReports()
    for record in records:
        reports.take(record)
    return reports.rows

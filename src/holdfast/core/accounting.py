"""Where a run's time went, from its records alone: what was training, what of it was kept, and what the faults cost.

Every second between the first and the last record falls into one bucket of `Account`, when the next record comes. Which
reports were superseded, and with how much training, `curve` decides; `summary` brings the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from holdfast.core import records as r
from holdfast.core.curve import Change, Curve
from holdfast.core.root_cause import root_cause

__all__ = ["Account", "Accountant", "Recovery"]


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
    """Noticing is over, work has not begun again: stopping, starting, loading. Planned changes are in here, too."""
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
class _Failure:
    ended: r.GenerationEnded
    lost_iterations: int = 0


@dataclass(slots=True)
class Accountant:
    """Fed with every record in order: `apply_time` before the curve is, `apply_change` afterwards."""

    _phase: str = "down"
    _cursor: float | None = None
    _spent: dict[str, float] = field(default_factory=dict)
    """Seconds by bucket. What was trained and reported is the curve's, and not in here."""
    _tail_s: float = 0.0
    """Training since the last report."""
    _unsaved_s: float = 0.0
    """Training beyond the last commit of a run that failed or was interrupted: lost, unless it was committed after
    all and the next generation starts beyond it."""
    _unsaved_iterations: int = 0
    _lost_iterations: int = 0
    _failures: list[_Failure] = field(default_factory=list)
    _recoveries: list[Recovery] = field(default_factory=list)

    def account(self, curve: Curve) -> Account:
        """The account so far of the run that has this curve."""
        kept_s = self._spent.get("kept", 0.0) + curve.last.trained_s - self._unsaved_s + self._tail_s
        return Account(
            start_up_s=self._spent.get("start_up", 0.0),
            training_kept_s=kept_s,
            training_lost_s=self._spent.get("lost", 0.0) + self._unsaved_s,
            stall_s=self._spent.get("stall", 0.0),
            recovery_s=self._spent.get("recovery", 0.0),
            waiting_s=self._spent.get("waiting", 0.0),
            down_s=self._spent.get("down", 0.0),
            lost_iterations=self._lost_iterations + self._unsaved_iterations,
            recoveries=tuple(self._recoveries),
        )

    def apply_time(self, record: r.Record) -> float:
        """Attribute the time up to a record. Returns the training that a report ends, in seconds."""
        if isinstance(record, r.Reported):
            self._pass_time(record.at)
            trained_s, self._tail_s = self._tail_s, 0.0
            if record.stall_s:
                stall_s = min(record.stall_s, trained_s)
                self._spend("stall", stall_s)
                trained_s -= stall_s
            return trained_s
        match record:
            case r.GenerationEnded():
                self._end_generation(record)
            case r.ControllerStarted():
                self._stop_training("down")  # the controller before ended with its last record
                self._pass_time(record.at)
                self._phase = "start_up"
                self._failures.clear()
            case _:
                self._pass_time(record.at)
        match record:
            case r.GenerationStarted():
                self._phase = "recovery" if self._phase == "waiting" else self._phase
            case r.GenerationRunning():
                self._phase = "training"
                self._end_recoveries(record)
            case r.RunFinished():
                self._spend("kept", self._tail_s)
                self._tail_s, self._phase = 0.0, "down"
            case r.RunFailed() | r.RunInterrupted():
                self._stop_training("down")
        return 0.0

    def apply_change(self, record: r.Record, change: Change) -> None:
        """Count what a record superseded."""
        self._spend("lost", change.lost_s)
        self._lost_iterations += change.lost_iterations
        if isinstance(record, r.GenerationStarted):
            self._unsaved_s, self._unsaved_iterations = 0.0, 0
            if self._failures:
                self._failures[-1].lost_iterations = change.lost_iterations
        elif isinstance(record, r.RunRestarted):
            self._spend("lost", self._unsaved_s)
            self._spend("kept", -self._unsaved_s)
            self._lost_iterations += self._unsaved_iterations
            self._unsaved_s, self._unsaved_iterations = 0.0, 0

    def write_off(self, curve: Curve, committed: int) -> None:
        """The run ended without success: what it trained after the iteration `committed` is lost."""
        self._unsaved_iterations = max(0, curve.last.iteration - committed)
        self._unsaved_s = curve.last.trained_s - curve.at(committed).trained_s if self._unsaved_iterations else 0.0

    def _pass_time(self, until: float) -> None:
        """Time passed in the present phase. Clocks of other machines may be off: it never runs backwards."""
        if self._cursor is None:
            self._cursor = until
        seconds = max(0.0, until - self._cursor)
        self._cursor += seconds
        if self._phase == "training":
            self._tail_s += seconds
        else:
            self._spend(self._phase, seconds)

    def _spend(self, bucket: str, seconds: float) -> None:
        if seconds:
            self._spent[bucket] = self._spent.get(bucket, 0.0) + seconds

    def _stop_training(self, phase: str) -> None:
        """Work that was not reported is lost with the workers that did it."""
        self._spend("lost", self._tail_s)
        self._tail_s, self._phase = 0.0, phase

    def _end_generation(self, record: r.GenerationEnded) -> None:
        self._pass_time(min(record.detected_at, record.at))
        if record.planned:
            self._spend("stall", self._tail_s)  # the ranks stayed in their last report
            self._tail_s, self._phase = 0.0, "recovery"
            self._pass_time(record.at)
            self._phase = "waiting"
            return
        failed = record.counted or bool(record.failures)
        self._stop_training("recovery" if failed else "down")
        self._pass_time(record.at)
        if failed:
            self._phase = "waiting"
            self._failures.append(_Failure(record))

    def _end_recoveries(self, record: r.GenerationRunning) -> None:
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

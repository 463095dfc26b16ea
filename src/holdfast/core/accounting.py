"""Where a run's time went, and which of its reports count: both from records alone.

Every second from the first record to the last is put down to one purpose. Training is kept or lost only when the
next generation says from which iteration it goes on, so the last stretch of training is held until then.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.core import records as r
from holdfast.core.blame import root_cause

__all__ = ["Account", "Accountant", "Recovery", "account", "effective_reports"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """One failure that the run got over: what died, what was lost, how long it took."""

    generation: int
    """The generation that failed."""
    cause: r.WorkerFailure | None
    why: str
    lost_iterations: int
    elapsed_s: float
    """From the moment the failure was known to the moment all workers ran again."""


@dataclass(slots=True)
class Account:
    """Seconds by purpose. They add up to the wall time, and `goodput` is the share of `training_kept_s` in it."""

    start_up_s: float = 0.0
    training_kept_s: float = 0.0
    training_lost_s: float = 0.0
    stall_s: float = 0.0
    recovery_s: float = 0.0
    waiting_s: float = 0.0
    down_s: float = 0.0
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        spent = self.start_up_s + self.training_kept_s + self.training_lost_s + self.stall_s
        return spent + self.recovery_s + self.waiting_s + self.down_s

    @property
    def goodput(self) -> float | None:
        return self.training_kept_s / self.wall_s if self.wall_s > 0 else None


class Accountant:
    """Fed with every record in order; `account` may be read at any time."""

    def __init__(self) -> None:
        self.account = Account()
        self._last_at: float | None = None
        self._spent_until: float | None = None
        """Up to here every second is put down to something."""
        self._purpose = "start_up_s"
        self._running_at: float | None = None
        self._iterations = array("q")
        self._times = array("d")
        self._stalls = array("d")
        self._held_until: float | None = None
        """End of a stretch of training whose worth is not known yet."""
        self._committed = 0
        self._ended: r.GenerationEnded | None = None
        self._lost_iterations = 0

    def take(self, record: r.Record) -> None:
        at = record.at if self._last_at is None else max(record.at, self._last_at)
        match record:
            case r.Reported():
                self._iterations.append(record.iteration)
                self._times.append(at)
                self._stalls.append(record.stall_s)
            case r.ControllerStarted():
                self._hold(self._last_at)
                self._spend("down_s", at)
                self._purpose, self._ended = "start_up_s", None
            case r.GenerationStarted():
                self._hold(at)
                self._judge(record.iteration)
                self._spend(self._purpose, at)
                self._purpose = "recovery_s" if self._ended is not None else "start_up_s"
            case r.GenerationRunning():
                self._spend(self._purpose, at)
                self._recovered(at)
                self._running_at = at
            case r.GenerationEnded():
                self._hold(min(at, max(record.detected_at, self._running_at or record.detected_at)))
                self._ended, self._purpose = record, "waiting_s"
            case r.CheckpointCommitted():
                self._committed = record.iteration
            case r.RunFinished():
                self._hold(at)
                self._judge(None)
            case r.RunFailed() | r.RunInterrupted():
                self._hold(at)
                self._judge(self._committed)
            case _:
                pass
        self._last_at = at

    def _hold(self, until: float | None) -> None:
        if self._running_at is not None and self._held_until is None and until is not None:
            self._held_until = max(until, self._running_at)

    def _judge(self, iteration: int | None) -> None:
        """The held stretch of training is kept up to the report of `iteration` (None: all of it)."""
        if self._running_at is None or self._held_until is None:
            return
        kept = len(self._iterations) if iteration is None else bisect_right(self._iterations, iteration)
        kept_until = self._held_until if iteration is None else (self._times[kept - 1] if kept else self._running_at)
        kept_until = min(kept_until, self._held_until)
        stalled_s = min(sum(self._stalls[:kept]), kept_until - self._running_at)
        self.account.stall_s += stalled_s
        self.account.training_kept_s += kept_until - self._running_at - stalled_s
        self.account.training_lost_s += self._held_until - kept_until
        self._lost_iterations = len(self._iterations) - kept
        self._spent_until = self._held_until
        self._running_at = self._held_until = None
        for column in (self._iterations, self._times, self._stalls):
            del column[:]

    def _spend(self, purpose: str, at: float) -> None:
        if self._spent_until is not None and at > self._spent_until:
            setattr(self.account, purpose, getattr(self.account, purpose) + at - self._spent_until)
        self._spent_until = at

    def _recovered(self, at: float) -> None:
        ended, self._ended = self._ended, None
        if ended is None or not ended.failures:
            return
        cause = root_cause(ended.failures) if ended.failures else None
        elapsed_s = at - ended.detected_at
        self.account.recoveries.append(Recovery(ended.generation, cause, ended.why, self._lost_iterations, elapsed_s))


def account(records: Iterable[r.Record]) -> Account:
    """The account of a whole journal."""
    accountant = Accountant()
    for record in records:
        accountant.take(record)
    return accountant.account


def effective_reports(records: Iterable[r.Record]) -> list[r.Reported]:
    """The reports that count: a generation that starts from an earlier iteration supersedes those beyond it."""
    rows: list[r.Reported] = []
    for record in records:
        if isinstance(record, r.Reported):
            rows.append(record)
        elif isinstance(record, r.GenerationStarted):
            del rows[bisect_right(rows, record.iteration, key=lambda row: row.iteration) :]
    return rows

"""The one fold of a run's records: its durable state, its effective curve, and where its time went.

`Summary.apply` is fed with every record in order. Result files, the terminal, `Result`, `holdfast events` and the
accounts all read what it gives, so they cannot disagree. A summary and the records after it give the same as all
records would; it takes a few kilobytes, whatever the number of reports. `journal.fold` writes it beside the journal,
and a new controller starts from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.core import records as r
from holdfast.core.accounting import Account, Accountant
from holdfast.core.curve import Change, Curve
from holdfast.core.state import Durable, fold

__all__ = ["Summary", "summarize"]


@dataclass(slots=True)
class Summary:
    """Everything that a controller and the views need of the records so far."""

    durable: Durable = field(default_factory=Durable)
    curve: Curve = field(default_factory=Curve)
    accountant: Accountant = field(default_factory=Accountant)
    started: r.ControllerStarted | None = None
    """The newest controller's first record."""

    @property
    def iteration(self) -> int:
        """How far training has come."""
        return self.durable.iteration

    @property
    def account(self) -> Account:
        return self.accountant.account(self.curve)

    @property
    def newest_checkpoint(self) -> str | None:
        """Name of the checkpoint from which the run would go on."""
        newest = self.durable.resume_point()
        return newest.name if newest is not None else None

    def apply(self, record: r.Record) -> Change:
        """Bring the summary up to date with one record; returns what that changed of the reports that count."""
        fold(self.durable, record)
        trained_s = self.accountant.apply_time(record)
        change = self.curve.apply(record, trained_s)
        if isinstance(record, r.Reported) and not change.lost_iterations:
            return change  # most records, and nothing more to do for them
        self.accountant.apply_change(record, change)
        if isinstance(record, r.ControllerStarted):
            self.started = record
        elif isinstance(record, r.RunFailed | r.RunInterrupted):
            newest = self.durable.resume_point()
            self.accountant.write_off(self.curve, newest.iteration if newest is not None else 0)
        return change


def summarize(records: Iterable[r.Record]) -> Summary:
    """The summary of a whole journal."""
    summary = Summary()
    for record in records:
        summary.apply(record)
    return summary

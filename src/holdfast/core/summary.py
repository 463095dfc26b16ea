"""A run's whole journal in a few kilobytes: its durable state, its curve, and where its time went.

`Summary.take` is fed with every record in order, so a summary and the records after it give the same as all records
would. `journal.fold` writes it beside the journal, and a new controller starts from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core import records as r
from holdfast.core.accounting import Accountant
from holdfast.core.curve import Curve, Row
from holdfast.core.state import Durable, fold

__all__ = ["Summary"]


@dataclass(slots=True)
class Summary:
    """Everything that a controller and the views for people need of the records so far."""

    durable: Durable = field(default_factory=Durable)
    curve: Curve = field(default_factory=Curve)
    accountant: Accountant = field(default_factory=Accountant)
    started: r.ControllerStarted | None = None
    """The newest controller's first word."""

    def take(self, record: r.Record) -> Row | None:
        """Take one record in; the row if it is a report."""
        fold(self.durable, record)
        self.accountant.take(record)
        if isinstance(record, r.ControllerStarted):
            self.started = record
        return self.curve.take(record)

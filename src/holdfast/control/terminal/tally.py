"""What the summary at the end counts, gathered record by record. `terminal` feeds it, `blocks` shows it.

Where the time went is `core.accounting`'s to say, so that the terminal and the command line never disagree.
"""

from __future__ import annotations

from holdfast.control.outputs.curve import Curve, Row
from holdfast.core import records as r
from holdfast.core.accounting import Account, Accountant

__all__ = ["Tally"]


class Tally:
    """The run so far, over all of its controllers."""

    def __init__(self) -> None:
        self.iteration = 0
        self.began = 0.0
        """When the present controller started."""
        self._curve = Curve()
        self._accountant = Accountant()
        self._checkpoints: dict[str, int] = {}

    @property
    def account(self) -> Account:
        return self._accountant.account

    @property
    def newest(self) -> str | None:
        """Name of the newest committed checkpoint."""
        return max(self._checkpoints, key=lambda name: (self._checkpoints[name], name), default=None)

    def take(self, record: r.Record) -> Row | None:
        """Count one record; the row if it is a report."""
        self._accountant.take(record)
        row = self._curve.take(record)
        match record:
            case r.Reported() | r.GenerationStarted():
                self.iteration = record.iteration
            case r.ControllerStarted():
                self.began = record.at
            case r.RunRestarted():
                self._checkpoints.clear()  # none of them is resumed from
            case r.CheckpointCommitted():
                self._checkpoints[record.name] = record.index
            case r.CheckpointDeleted() | r.CheckpointDamaged():
                self._checkpoints.pop(record.name, None)
        return row

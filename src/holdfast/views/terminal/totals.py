"""What the summary at the end counts. `terminal` feeds it, `layouts` shows it.

All of it is `core.summary`'s to say, so that the terminal, the files and the command line never disagree.
"""

from __future__ import annotations

from holdfast.core import records as r
from holdfast.core.accounting import Account
from holdfast.core.curve import Row
from holdfast.core.summary import Summary

__all__ = ["Totals"]


class Totals:
    """The run so far, over all of its controllers; `prior` is what earlier ones left, and is changed from here on."""

    def __init__(self, prior: Summary | None = None) -> None:
        self._summary = prior if prior is not None else Summary()

    @property
    def iteration(self) -> int:
        return self._summary.durable.iteration

    @property
    def began(self) -> float:
        """When the present controller started."""
        return self._summary.started.at if self._summary.started is not None else 0.0

    @property
    def account(self) -> Account:
        return self._summary.accountant.account

    @property
    def newest(self) -> str | None:
        """Name of the checkpoint from which the run would go on."""
        newest = self._summary.durable.resume_point()
        return newest.name if newest is not None else None

    def take(self, record: r.Record) -> Row | None:
        """Count one record; the row if it is a report."""
        return self._summary.take(record)

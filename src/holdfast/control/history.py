"""A run as its journal tells it: the records that count and the state they fold to. Reading only.

`run` starts a controller from it, `view` shows it to people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.control.journal import read_records
from holdfast.control.lease import read_cuts
from holdfast.core.records import Record
from holdfast.core.state import Durable, fold
from holdfast.errors import NotFound
from holdfast.storage.store import Store

__all__ = ["RUN_FILE", "History", "read_history"]

RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class History:
    """What a run's directory knows. `exists` is False where no controller ever took it on."""

    exists: bool
    records: Sequence[Record]
    durable: Durable


def read_history(store: Store) -> History:
    """Fold the journal of the run whose directory is the store's root."""
    try:
        store.size(RUN_FILE)
    except NotFound:
        return History(False, [], Durable())
    cuts = read_cuts(store)
    records = read_records(store, cuts)
    durable = Durable()
    for record in records:
        fold(durable, record)
    return History(True, records, durable)

"""A run as its journal tells it: the records that count and the state they fold to. Reading only.

`run` starts a controller from it, `view` shows it to people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.control.journal_reader import JournalReader
from holdfast.control.lease import read_cuts
from holdfast.core.records import Record
from holdfast.core.state import Durable, fold
from holdfast.errors import NotFound
from holdfast.storage.store import Store

__all__ = ["RUN_FILE", "History", "read_history", "run_id"]

RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class History:
    """What a run's directory knows. `exists` is False where no controller ever took it on."""

    exists: bool
    records: Sequence[Record]
    durable: Durable
    damage: Sequence[str] = ()
    """One sentence for each thing in the journal that could not be read."""


def read_history(store: Store) -> History:
    """Fold the journal of the run whose directory is the store's root."""
    try:
        identity = store.get(RUN_FILE)
    except NotFound:
        return History(False, [], Durable())
    damage: list[str] = []
    reader = JournalReader(store, read_cuts(store), run_id(identity), damage.append)
    records = [line.record for _, line in reader.read()]
    durable = Durable()
    for record in records:
        fold(durable, record)
    return History(True, records, durable, damage)


def run_id(identity: bytes) -> str:
    """The id that the records of this run carry, from run.json; "" if it has none, or cannot be read."""
    try:
        return msgspec.json.decode(identity, type=_Identity).id
    except msgspec.MsgspecError:
        return ""


class _Identity(msgspec.Struct):
    id: str = ""

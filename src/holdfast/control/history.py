"""A run as its journal tells it. Reading only.

`read_history` gives the summary, from the fold and the records after it: `run` starts a controller from it, `view`
shows it to people. `read_records` gives every record, one by one, for those who want them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.checkpoint.manifest import has_valid_seal
from holdfast.control.lease import read_cuts
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.core.records import Record
from holdfast.core.state import Durable
from holdfast.core.summary import Summary
from holdfast.errors import NotFound
from holdfast.journal.fold import read_fold
from holdfast.journal.reader import START, JournalReader, Mark, OnDamage
from holdfast.storage.store import Store

__all__ = ["RUN_FILE", "History", "is_experiment", "open_journal", "read_history", "read_records", "run_id"]

RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class History:
    """What a run's directory knows. `exists` is False where no controller ever took it on."""

    exists: bool
    run: str = ""
    """The id of the run, "" where it is not known."""
    journal: JournalReader | None = None
    """With `exists`."""
    summary: Summary = field(default_factory=Summary)
    damage: Sequence[str] = ()
    """One sentence for each thing in the journal that could not be read."""
    is_experiment: bool = False
    """It is no run, but a tuning experiment, whose journal only tuning reads."""

    @property
    def durable(self) -> Durable:
        return self.summary.durable


def read_history(store: Store) -> History:
    """Summarise the journal of the run whose directory is the store's root."""
    damage: list[str] = []
    try:
        identity = store.get(RUN_FILE)
    except NotFound:
        return History(False)
    if is_experiment(identity):
        return History(True, run_id(identity), is_experiment=True)
    run = run_id(identity)
    reader = JournalReader(store, read_cuts(store), run, damage.append)
    fold = read_fold(store, reader, run)
    summary, mark = (Summary(), START) if fold is None else (fold.summary, fold.mark)
    for _, line in reader.read(mark):
        summary.apply(line.record)
    return History(True, run, reader, summary, damage)


def read_records(store: Store, after: Mark = START, on_damage: OnDamage | None = None) -> Iterator[Record]:
    """Every record that counts, in order; `NotFound` if the directory holds no run."""
    reader, _ = open_journal(store, on_damage)
    for _, line in reader.read(after):
        yield line.record


def open_journal(store: Store, on_damage: OnDamage | None = None) -> tuple[JournalReader, str]:
    """The run's journal and its id; `NotFound` if the directory holds no run."""
    run = run_id(store.get(RUN_FILE))
    return JournalReader(store, read_cuts(store), run, on_damage), run


def run_id(identity: bytes) -> str:
    """The id that the records of this run carry, from run.json.

    "" if run.json is torn or altered: records of any run are then taken for this one's, which is better than none.
    """
    if not has_valid_seal(identity):
        return ""
    try:
        return msgspec.json.decode(identity, type=_Identity).id
    except DECODE_ERRORS:
        return ""


def is_experiment(identity: bytes) -> bool:
    """Whether run.json is a tuning experiment's."""
    try:
        return msgspec.json.decode(identity, type=_Identity).experiment
    except DECODE_ERRORS:
        return False


class _Identity(msgspec.Struct):
    id: str = ""
    experiment: bool = False

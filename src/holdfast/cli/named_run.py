"""What the argument RUN of the commands that ask drivers may name: a run, a tuning experiment, or one of its trials."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.cli.uri_args import find_run_or_name, split
from holdfast.control.client import DriverAddress, find_driver
from holdfast.control.history import RUN_FILE, is_experiment, run_id
from holdfast.control.lease import read_cuts
from holdfast.core import records as r
from holdfast.errors import NotFound
from holdfast.journal.reader import JournalReader
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store

__all__ = ["NamedRun", "find_named_run"]


@dataclass(frozen=True, slots=True)
class NamedRun:
    store: Store
    is_experiment: bool = False
    experiment: Store | None = None
    """Of a trial: the directory of its experiment."""
    trial: str = ""
    """The trial's id."""

    def find_driver(self) -> DriverAddress | None:
        """The driver that holds it, as far as can be known without asking it."""
        found = find_driver(self.experiment or self.store)
        return replace(found, run=self.trial) if found is not None and self.trial else found


def find_named_run(text: str) -> NamedRun:
    """By URI, or by its name alone where it lies in the default storage path. `NotFound` if there is none."""
    store = find_run_or_name(text)
    try:
        return NamedRun(store, is_experiment(store.get(RUN_FILE)))
    except NotFound:
        if (trial := _find_trial(text, store)) is not None:
            return trial
        raise NotFound(f"{store.uri} is no training run (it has no run.json): check the path or the name.") from None


def _find_trial(text: str, store: Store) -> NamedRun | None:
    above, name = split(text)
    experiment = open_store(above)
    try:
        identity = experiment.get(RUN_FILE)
    except NotFound:
        return None
    if not is_experiment(identity):
        return None
    for _, line in JournalReader(experiment, read_cuts(experiment), run_id(identity), shared=True).read():
        if isinstance(line.record, r.TrialCreated) and line.record.directory == name:
            return NamedRun(store, experiment=experiment, trial=line.record.trial)
    return None

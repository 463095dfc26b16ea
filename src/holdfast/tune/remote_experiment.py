"""`Tuner.fit()` of a caller outside the cluster's network: the experiment's driver is on the cluster's head, and its
records come here, where the same code folds them into results (`train.remote_fit`)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from holdfast.core.commands import RunStatus
from holdfast.errors import TrainingFailedError
from holdfast.storage.locate import open_store
from holdfast.train.remote_driver import DriverOutcome
from holdfast.train.remote_fit import fit_on_cluster, for_cluster
from holdfast.tune.experiment_request import ExperimentRequest
from holdfast.tune.run_experiment import ExperimentOutcome, fold_outcome, read_lines, trial_requests

if TYPE_CHECKING:
    from holdfast.tune.tuner import Tuner

__all__ = ["experiment_outcome", "stored_outcome", "tune_on_cluster"]


def tune_on_cluster(address: str, tuner: Tuner, request: ExperimentRequest) -> ExperimentOutcome:
    """What came of the experiment's driver on the cluster."""
    sent = copy.copy(tuner)
    sent._run_config = for_cluster(request.run_config, request.storage_path)
    outcome = fit_on_cluster(address, trial_requests(request).base, sent)
    assert outcome.lines is not None
    return fold_outcome(request, RunStatus.FINISHED, "", outcome.experiment_id, outcome.lines, is_sent=True)


def experiment_outcome(tuner: Tuner, request: ExperimentRequest) -> DriverOutcome:
    """Call `fit()` on the head; `request` is what it will ask for."""
    try:
        tuner.fit()
    except TrainingFailedError:
        pass  # of the trial that stopped all others: the records have it
    return stored_outcome(request)


def stored_outcome(request: ExperimentRequest) -> DriverOutcome:
    """What the experiment's directory says came of it."""
    store = open_store(request.storage_path, request.run_config.storage_filesystem).sub(request.name)
    try:
        experiment_id, lines = read_lines(store)
    finally:
        store.close()
    return DriverOutcome(experiment_id=experiment_id, lines=lines)

"""`Tuner.fit()` in a script that `holdfast launch` runs on several hosts: one of them leads the experiment, trials run
on the agents of all, and all return the same results. `train.launched` has the election.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from holdfast.core.commands import RunStatus
from holdfast.rendezvous.launcher_messages import FitResult, Lead, PublishedRun
from holdfast.storage.locate import open_store
from holdfast.train.launched import Publish, lead_or_follow, listen_at, read_sent, result_for_all
from holdfast.train.remote_driver import DriverOutcome
from holdfast.tune.experiment_request import ExperimentRequest
from holdfast.tune.run_experiment import ExperimentOutcome, fold_outcome, read_lines, read_outcome

__all__ = ["tune_launched"]


def tune_launched(
    request: ExperimentRequest, run: Callable[[ExperimentRequest], ExperimentOutcome]
) -> ExperimentOutcome:
    """Lead the experiment with `run`, or wait for whoever does, and read the results."""

    def lead(order: Lead, publish: Publish) -> tuple[ExperimentOutcome, FitResult | None]:
        leading = _with_experiment(request, order.run)
        published = PublishedRun(storage_path=leading.storage_path, name=leading.name)
        if order.run is not None:  # whoever led before is fenced
            leading = replace(leading, run_config=replace(leading.run_config, takeover=True))
        outcome = run(
            replace(
                leading,
                listen=listen_at(order),
                on_listening=lambda join_string: publish(join_string, published),
                workers=order.workers[1] if order.workers is not None else None,
            )
        )
        sent = partial(_outcome_of_experiment, leading)
        return outcome, result_for_all(published, outcome.status, outcome.interrupted_by, "", sent)

    def follow(result: FitResult) -> ExperimentOutcome:
        following = _with_experiment(request, result.run)
        store = open_store(following.storage_path, following.run_config.storage_filesystem).sub(following.name)
        try:
            sent = read_sent(store, result)
        finally:
            store.close()
        status = RunStatus(result.status)
        why = result.why if status is RunStatus.INTERRUPTED else ""
        if sent is not None and sent.lines is not None:
            return fold_outcome(following, status, why, sent.experiment_id, sent.lines, is_sent=True)
        return read_outcome(following, status, why)

    return lead_or_follow(lead, follow, lambda: run(request))


def _outcome_of_experiment(request: ExperimentRequest) -> DriverOutcome:
    store = open_store(request.storage_path, request.run_config.storage_filesystem).sub(request.name)
    try:
        experiment_id, lines = read_lines(store)
    finally:
        store.close()
    return DriverOutcome(experiment_id=experiment_id, lines=lines)


def _with_experiment(request: ExperimentRequest, run: PublishedRun | None) -> ExperimentRequest:
    """The same experiment as the first leader's, which may have made up another name, or have another home."""
    if run is None:
        return request
    is_given = request.run_config.storage_filesystem is not None
    return replace(request, storage_path=request.storage_path if is_given else run.storage_path, name=run.name)

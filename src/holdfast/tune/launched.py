"""`Tuner.fit()` in a script that `holdfast launch` runs on several hosts: one of them leads the experiment, trials run
on the agents of all, and all return the same results. `train.launched` has the election.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

from holdfast.core.commands import RunStatus
from holdfast.rendezvous.launcher_messages import FitResult, Lead, PublishedRun
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store
from holdfast.train.interrupted import make_interrupted
from holdfast.train.launched import Publish, lead_or_follow, listen_at, published_run, read_sent, result_for_all
from holdfast.tune.experiment_request import ExperimentRequest
from holdfast.tune.remote_experiment import stored_outcome
from holdfast.tune.run_experiment import ExperimentOutcome, fold_outcome, read_outcome

__all__ = ["tune_launched"]


def tune_launched(
    request: ExperimentRequest, run: Callable[[ExperimentRequest], ExperimentOutcome]
) -> ExperimentOutcome:
    """Lead the experiment with `run`, or wait for whoever does, and read the results."""

    def lead(order: Lead, publish: Publish) -> tuple[ExperimentOutcome, FitResult | None]:
        leading = _with_experiment(request, order.run)
        if order.run is not None:  # whoever led before is fenced
            leading = replace(leading, run_config=replace(leading.run_config, takeover=True))
        outcome = run(
            replace(
                leading,
                listen=listen_at(order),
                on_listening=lambda join_string: publish(join_string, _published(leading)),
                workers=order.workers[1] if order.workers is not None else None,
            )
        )
        sent = partial(stored_outcome, leading)
        return outcome, result_for_all(_published(leading), outcome.status, outcome.interrupted_by, sent)

    def follow(result: FitResult) -> ExperimentOutcome:
        status = RunStatus(result.status)
        if status is RunStatus.INTERRUPTED:  # there are no results, whatever this host sees
            raise make_interrupted(result.interrupted_by)
        following = _with_experiment(request, result.run)
        with closing(_open(following)) as store:
            sent = read_sent(store, result)
        if sent is not None and sent.lines is not None:
            return fold_outcome(following, status, "", sent.experiment_id, sent.lines, is_sent=True)
        return read_outcome(following, status, "")

    return lead_or_follow(lead, follow, lambda: run(request))


def _open(request: ExperimentRequest) -> Store:
    return open_store(request.storage_path, request.run_config.storage_filesystem).sub(request.name)


def _published(request: ExperimentRequest) -> PublishedRun:
    with closing(_open(request)) as store:
        return published_run(store, request.storage_path, request.name)


def _with_experiment(request: ExperimentRequest, run: PublishedRun | None) -> ExperimentRequest:
    """The same experiment as the first leader's, which may have made up another name, or have another home."""
    if run is None:
        return request
    is_given = request.run_config.storage_filesystem is not None
    return replace(request, storage_path=request.storage_path if is_given else run.storage_path, name=run.name)

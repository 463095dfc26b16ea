"""`fit()` in the processes of torchrun (`num_workers=0`): rank 0 is the run, the others run the function beside it.

`holdfast.worker.torchrun` has what they say to each other.
"""

from __future__ import annotations

from holdfast.control.request import TrainOutcome, TrainRequest
from holdfast.control.run import run_training
from holdfast.core.commands import RunStatus
from holdfast.storage.uri import join
from holdfast.train.result import Result
from holdfast.worker import bootstrap
from holdfast.worker.torchrun import OtherRankSession, Torchrun

__all__ = ["run_other_rank", "run_rank_zero"]


def run_rank_zero(request: TrainRequest, torchrun: Torchrun) -> TrainOutcome:
    """Run or continue the run as local mode does; the others start with it, and return when it is complete."""
    try:
        outcome = run_training(request)
    except BaseException as error:
        torchrun.fail(f"{type(error).__name__}: {error}")
        raise
    if outcome.status is RunStatus.FINISHED:
        torchrun.finish(join(request.storage_path, request.name))
    else:
        torchrun.fail(str(outcome.error) if outcome.error is not None else f"the run was {outcome.status}")
    return outcome


def run_other_rank(request: TrainRequest, torchrun: Torchrun) -> Result:
    """Run the function from the checkpoint that rank 0 starts from; raises what it raises. The result is the run's,
    with the metrics that this rank reported last."""
    try:
        start = torchrun.await_start()
        if start.assignment is None:
            return Result.from_path(start.storage, request.filesystem)
        session = OtherRankSession(torchrun, start.assignment, request.filesystem)
        bootstrap.run_other_rank(torchrun.returning_together(request.job), session, request.environment)
        torchrun.await_end()
        return Result.from_path(start.storage, request.filesystem)._with_metrics(session.metrics)
    finally:
        torchrun.leave()

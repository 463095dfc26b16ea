"""`TuneReportCallback`: what a trainer reports whose `fit()` is called in a trial reaches the trial.

The module has Ray's name, so that scripts keep theirs. The trainer's run is one of its own: its driver is the trial's
worker, and its checkpoints are its own. The callback is called in a thread of that driver, while the trial's function
waits in `fit()`; so the session, which serves one caller at a time, serves this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.storage.uri import join
from holdfast.train.callbacks import UserCallback
from holdfast.worker.session import installed

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.control.request import RunContext

__all__ = ["CHECKPOINT_PATH_KEY", "TuneReportCallback"]

CHECKPOINT_PATH_KEY = "checkpoint_path"
"""The metric that says where the checkpoint of a report lies."""


class TuneReportCallback(UserCallback):
    """Reports to the trial in which it is made what rank 0 of a trainer reports: for the trainer's
    `RunConfig(callbacks=[TuneReportCallback()])`.

    A checkpoint stays the trainer's: `checkpoint_path` says where it lies. Where the trial is not to go on, its
    trainer's workers are stopped, and `fit()` does not return. The trial's n-th report is the run's n-th: what the run
    does again after a failure is not reported again, and a trial that starts again, without a checkpoint of its own, is
    told first what the run has reported so far.
    """

    def __init__(self) -> None:
        session = installed()
        if session is None:
            raise RuntimeError(
                "TuneReportCallback() works only in a trial: make it in the function that is given to a Tuner, where "
                "that makes its trainer."
            )
        self._session = session
        self._run: tuple[str, str] | None = None
        self._told = 0
        """How many reports of the run the trial has been told."""
        self._iteration = 0
        self._early: dict[int, dict[str, Any]] = {}
        """Reports that were made after one whose checkpoint is still on its way to storage."""

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        if self._iteration > self._told:
            self._early[self._iteration] = _with_path(metrics[0], checkpoint)
        while (found := self._early.pop(self._told + 1, None)) is not None:
            self._tell(found)

    def _before_report(self, run_context: RunContext, iteration: int) -> None:
        self._iteration = iteration

    def _run_stands_at(self, run_context: RunContext, iteration: int) -> None:
        self._early.clear()  # they do not count
        run = run_context.storage_path, run_context.name
        if self._run != run:
            self._run = run
            # A trial with a checkpoint of its own knows, and says, what it has done.
            self._told = iteration if self._session.assignment.checkpoint is not None else 0
        if self._told < iteration:
            for metrics in _reported(run_context, self._told, iteration):
                self._tell(metrics)

    def _tell(self, metrics: dict[str, Any]) -> None:
        self._told += 1
        self._session.report(metrics)


def _with_path(metrics: dict[str, Any], checkpoint: Checkpoint | None) -> dict[str, Any]:
    return dict(metrics) if checkpoint is None else {**metrics, CHECKPOINT_PATH_KEY: checkpoint.path}


def _reported(run_context: RunContext, after: int, until: int) -> list[dict[str, Any]]:
    """What the run's journal has of these reports, as they were or would have been told."""
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.control.history import read_history
    from holdfast.control.view import read_reports

    filesystem = run_context.run_config.storage_filesystem
    directory = join(run_context.storage_path, run_context.name)
    store = Checkpoint(directory, filesystem)._open()
    stored = read_history(store).durable.checkpoints.values()
    checkpoints = {one.iteration: Checkpoint._from_store(store, one.name) for one in stored}
    return [
        _with_path(report.metrics, checkpoints.get(report.iteration))
        for report in read_reports(store)
        if after < report.iteration <= until
    ]

"""Calls users' `Callback` objects and progress reporters for what the journal says.

One that raises ends the experiment: `fit()` raises `TuneError` after the trials were stopped in order. What it is told
of is durable, so a driver that goes on later tells of what comes then, and of nothing twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.core import records as r
from holdfast.errors import TuneError
from holdfast.storage.store import Store
from holdfast.tune.callback import Callback
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.experiment_observer import ExperimentView
from holdfast.tune.machine import TrialState
from holdfast.tune.progress_reporter import ProgressReporter
from holdfast.tune.user_code import describe_error

__all__ = ["CallbackView", "ReporterCallback"]

_log = logging.getLogger("holdfast")


class CallbackView(ExperimentView):
    """`setup` are the arguments of `Callback.setup`; `store` is the experiment's directory."""

    def __init__(self, callbacks: Sequence[Callback], setup: dict[str, Any], store: Store) -> None:
        self._callbacks = callbacks
        self._setup = setup
        self._store = store
        self._trials: list[Trial] = []
        self._iteration = 0
        self._is_ended = False
        self._failing: set[str] = set()
        """Trials whose workers failed, and that have not been started again."""
        self.error: TuneError | None = None
        """What a hook raised."""
        self.on_error: Callable[[TuneError], None] = lambda error: None
        """Told of it at once, in this thread; the controller's."""

    def began(self, trials: Sequence[TrialState]) -> None:
        self._trials = list(trials)
        self._call("setup", **self._setup)

    def trial_added(self, trial: TrialState) -> None:
        self._trials.append(trial)

    def trial_changed(self, trial: TrialState, record: r.Record, before: str, result: dict[str, Any] | None) -> None:
        match record:
            case r.ControllerStarted():
                self._step("on_trial_start", trial)
            case r.GenerationStarted():
                if trial.trial_id in self._failing:
                    self._failing.remove(trial.trial_id)
                    self._step("on_trial_recover", trial)
                if record.checkpoint is not None:
                    self._step("on_trial_restore", trial)
            case r.GenerationEnded() if record.counted:
                self._failing.add(trial.trial_id)
            case r.Reported() if result is not None:
                self._iteration += 1
                self._step("on_trial_result", trial, result=result)
            case r.CheckpointCommitted():
                self._step("on_trial_save", trial)
                checkpoint = Checkpoint._from_store(self._store.sub(trial.directory), record.name)
                self._step("on_checkpoint", trial, checkpoint=checkpoint)
        if before != trial.status and trial.is_finished():
            self._failing.discard(trial.trial_id)
            self._step("on_trial_error" if trial.status == Trial.ERROR else "on_trial_complete", trial)

    def ended(self, why: str) -> None:
        self._is_ended = True
        self._call("on_experiment_end", trials=self._trials)

    def close(self) -> None:
        if not self._is_ended:
            self.ended("")

    def _step(self, hook: str, trial: TrialState, **others: Any) -> None:
        self._call("on_step_begin", iteration=self._iteration, trials=self._trials)
        self._call(hook, iteration=self._iteration, trials=self._trials, trial=trial, **others)
        self._call("on_step_end", iteration=self._iteration, trials=self._trials)

    def _call(self, hook: str, **arguments: Any) -> None:
        """After a hook has raised, nothing but the end is told any more."""
        if self.error is not None and hook != "on_experiment_end":
            return
        for callback in self._callbacks:
            if getattr(type(callback), hook, None) is getattr(Callback, hook):
                continue
            try:
                getattr(callback, hook)(**arguments)
            except BaseException as error:  # noqa: BLE001  whatever users write in a hook, an exit included
                where = f"{type(callback).__name__}.{hook}"
                if isinstance(callback, ReporterCallback):
                    where = f"RunConfig(progress_reporter): {callback.kind}"
                _log.exception("%s failed; the experiment is stopped.", where)
                if self.error is None:
                    self.error = TuneError(
                        f"{where} raised {describe_error(error)} (a callback's error ends the experiment; the same "
                        "call continues it once that is mended)"
                    )
                    self.error.__cause__ = error
                    self.on_error(self.error)
                if hook != "on_experiment_end":  # which the others are told all the same
                    return


class ReporterCallback(Callback):
    """A progress reporter of the user's own, asked whenever something has happened."""

    def __init__(self, reporter: ProgressReporter, **setup: Any) -> None:
        self._reporter = reporter
        self._setup = setup
        self.kind = type(reporter).__name__
        """For errors: users know nothing of this class."""

    def setup(self, stop: Any = None, num_samples: Any = None, total_num_samples: Any = None, **info: Any) -> None:
        self._reporter.setup(**self._setup)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._reporter.should_report(trials, done=False):
            self._reporter.report(trials, False)

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        if self._reporter.should_report(trials, done=True):
            self._reporter.report(trials, True)

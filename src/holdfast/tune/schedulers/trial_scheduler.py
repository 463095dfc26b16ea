"""`TrialScheduler`: decides which trial goes on, pauses or stops when it reports. `FIFOScheduler` lets all go on.

A scheduler is pure: what it decides depends on what it was told before, and on `self.seed`. It reads no clock and does
no I/O. The experiment records each result together with the decision, in one record; after a restart it constructs the
scheduler again from name and arguments, and repeats to it what happened, in the same order. `get_state` and
`set_state` save the repeating where there is a snapshot.

The order of calls: `on_trial_add` for each new trial, before its configuration is recorded; `on_trial_result` for each
report; one of `on_trial_complete` (it returned, or was stopped), `on_trial_error` (it failed for good) and
`on_trial_remove` (it ended before it ever ran, or was stopped by `TuneController.stop_trial`).
`choose_trial_to_run` is asked while there is room for one more; it changes nothing. When no trial runs, none is chosen,
the searcher gives none and some are paused, `on_idle` must let some of them go on: no barrier can wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.core.metrics import find_metric
from holdfast.errors import ConfigError
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.objective import Objective, check_metric, check_mode, number
from holdfast.tune.serialization import Stateful

__all__ = ["FIFOScheduler", "TrialScheduler", "TuneController", "configure_scheduler"]


class TuneController(Protocol):
    """What a scheduler may ask of the experiment, and have it do."""

    def get_trials(self) -> Sequence[Trial]:
        """All trials, in the order in which they were added."""

    def get_live_trials(self) -> Sequence[Trial]:
        """Those that have not ended, in the same order."""

    def stop_trial(self, trial: Trial) -> None:
        """End a trial that is not the one whose result is being decided on."""

    def unpause_trial(self, trial: Trial) -> None:
        """A trial that is paused, or that was told to pause and whose workers have not ended yet, is pending again as
        soon as they have, and goes on from its newest checkpoint when it is chosen."""

    def pin_checkpoint(self, trial: Trial, checkpoint: str) -> None:
        """Keep this checkpoint of the trial from retention."""

    def unpin_checkpoint(self, trial: Trial, checkpoint: str) -> None:
        """Retention may have it again, as soon as no trial needs it that was told to start from it."""

    def exploit_trial(self, trial: Trial, donor: Trial, checkpoint: str, config: dict[str, Any]) -> None:
        """The trial, running or paused, goes on from this checkpoint of another one, with this configuration, which
        wins over whatever the checkpoint holds."""


class TrialScheduler(Stateful):
    """Subclass it, or `FIFOScheduler`, and override what is needed."""

    CONTINUE = "CONTINUE"
    PAUSE = "PAUSE"
    """Stop its workers, and keep its checkpoint until it is chosen or unpaused. Its status is PAUSED when they have
    ended, which may take a while."""
    STOP = "STOP"
    NOOP = "NOOP"
    """The scheduler has told the controller already."""

    needs_metric = False
    """Whether it compares trials."""

    waits_for_checkpoints = False
    """Whether a result that comes with a checkpoint is told once that is committed; the trial waits meanwhile."""

    takes_turns = False
    """Whether all trials are created at once, also those that must wait, so that they can take turns."""

    seed: int = 0
    """The experiment's."""

    _metric: str | None = None
    _mode: str | None = None

    @property
    def metric(self) -> str | None:
        return self._metric

    @property
    def mode(self) -> str | None:
        return self._mode

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Take over the experiment's metric and mode, and `seed` in `spec`; False if the scheduler has its own."""
        if (metric and self._metric) or (mode and self._mode):
            return False
        self._metric, self._mode = metric or self._metric, mode or self._mode
        self.seed = spec.get("seed", self.seed)
        return True

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        """A new trial; its configuration may still be completed."""

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        """What becomes of the trial that has just reported."""
        raise NotImplementedError

    def on_trial_complete(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> None:
        """A trial has ended by itself, or by a decision of this scheduler; `result` is its last."""
        self._leave(tune_controller, trial)

    def on_trial_error(self, tune_controller: TuneController, trial: Trial) -> None:
        """A trial has failed for good."""
        self._leave(tune_controller, trial)

    def on_trial_remove(self, tune_controller: TuneController, trial: Trial) -> None:
        """A trial that was pending or paused has ended."""
        self._leave(tune_controller, trial)

    def _leave(self, tune_controller: TuneController, trial: Trial) -> None:
        """For schedulers to which it makes no difference in which of these ways a trial has ended."""

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        """A pending or paused trial that starts now; None to start none."""
        raise NotImplementedError

    def on_idle(self, tune_controller: TuneController) -> None:
        """Nothing runs, and nothing new can come: let paused trials go on. The base lets all of them."""
        for trial in tune_controller.get_live_trials():
            if trial.status == Trial.PAUSED:
                tune_controller.unpause_trial(trial)

    def debug_string(self) -> str:
        """One line for people."""
        return type(self).__name__


class FIFOScheduler(TrialScheduler):
    """Trials run in the order in which they came, each to its end; paused ones after those that have not run."""

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        return TrialScheduler.CONTINUE

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        for status in (Trial.PENDING, Trial.PAUSED):
            for trial in tune_controller.get_live_trials():
                if trial.status == status:
                    return trial
        return None

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


class ComparingScheduler(FIFOScheduler):
    """Base of those that compare trials by a metric at equal times. A result without the one or the other decides
    nothing; not-a-number ranks worst."""

    needs_metric = True

    def __init__(self, time_attr: str, metric: str | None, mode: str | None) -> None:
        name = type(self).__name__
        check_metric(f"{name}(time_attr)", time_attr)
        check_metric(f"{name}(metric)", metric, optional=True)
        check_mode(f"{name}(mode)", mode, optional=True)
        self._time_attr, self._metric, self._mode = time_attr, metric, mode

    @property
    def objective(self) -> Objective:
        assert self._metric and self._mode, "configure_scheduler was not called"
        return Objective(self._metric, self._mode)

    def time_and_score(self, result: dict[str, Any]) -> tuple[float, float] | None:
        """When the result was made, and how good it is: higher is better."""
        time, score = find_metric(result, self._time_attr), self.objective.score(result)
        if time is None or score is None:
            return None
        return number(time, self._time_attr), score


def configure_scheduler(scheduler: TrialScheduler, metric: str | None, mode: str | None, *, seed: int) -> None:
    """Give a scheduler what the experiment says, or raise one sentence."""
    name = type(scheduler).__name__
    for what, given, own in (("metric", metric, scheduler.metric), ("mode", mode, scheduler.mode)):
        if given and own and given != own:
            raise ConfigError(f"TuneConfig({what}={given!r}) and {name}({what}={own!r}) differ: give one of them.")
        if scheduler.needs_metric and not given and not own:
            raise ConfigError(f"{name} compares trials and needs a {what}: set TuneConfig({what}=...).")
    scheduler.set_search_properties(None if scheduler.metric else metric, None if scheduler.mode else mode, seed=seed)

"""`Callback`: the user's own code, called in the driver's process while an experiment goes on.

Derive from it, override what is needed, and give instances to `RunConfig(callbacks=[...])`. Hooks are called in order,
one at a time, in a thread of their own, after what they tell of is durable. `iteration` counts the results of all
trials. An exception in a hook ends the experiment: `fit()` raises `TuneError`. `callback_view` calls them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.tune.serialization import Component

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.tune.experiment.trial import Trial
    from holdfast.tune.stopper.stopper import Stopper

__all__ = ["Callback"]


class Callback(Component):
    """Every hook does nothing until it is overridden. `info` is for what later versions tell."""

    def setup(
        self,
        stop: Stopper | None = None,
        num_samples: int | None = None,
        total_num_samples: int | None = None,
        **info: Any,
    ) -> None:
        """Before the first trial of this driver."""

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Before each of the hooks for one trial."""

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """After each of them."""

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial starts, or goes on after a pause."""

    def on_trial_restore(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial has started from a checkpoint."""

    def on_trial_save(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A checkpoint of a trial is committed."""

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial has reported."""

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial has ended without an error."""

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial has failed and will be tried again."""

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial has failed for good."""

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: Checkpoint, **info: Any
    ) -> None:
        """A checkpoint of a trial is committed: this one."""

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """All trials have ended."""

    def get_state(self) -> dict[str, Any] | None:
        """Never called: a driver that goes on constructs callbacks anew."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Never called."""

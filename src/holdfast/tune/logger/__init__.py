"""`LoggerCallback`, to send results elsewhere, and the names of the loggers that Ray Tune has by default.

Each trial's directory always has result.json, progress.csv and TensorBoard's events: `holdfast.views.files` writes them
from the journal. So `JsonLoggerCallback`, `CSVLoggerCallback` and `TBXLoggerCallback` are accepted, and have nothing
left to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.tune.callback import Callback

if TYPE_CHECKING:
    from holdfast.tune.experiment.trial import Trial

__all__ = ["CSVLoggerCallback", "JsonLoggerCallback", "LoggerCallback", "TBXLoggerCallback"]


class LoggerCallback(Callback):
    """Override the `log_trial_...` methods."""

    def log_trial_start(self, trial: Trial) -> None:
        """A trial starts, or goes on."""

    def log_trial_restore(self, trial: Trial) -> None:
        """It has started from a checkpoint."""

    def log_trial_save(self, trial: Trial) -> None:
        """A checkpoint is committed."""

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """It has reported."""

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """It has ended."""

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.log_trial_start(trial)

    def on_trial_restore(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.log_trial_restore(trial)

    def on_trial_save(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.log_trial_save(trial)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self.log_trial_result(iteration, trial, result)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.log_trial_end(trial, failed=False)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.log_trial_end(trial, failed=True)


class JsonLoggerCallback(LoggerCallback):
    """result.json and params.json are written in any case."""


class CSVLoggerCallback(LoggerCallback):
    """progress.csv is written in any case."""


class TBXLoggerCallback(LoggerCallback):
    """TensorBoard's events are written in any case."""

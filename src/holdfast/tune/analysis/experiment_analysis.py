"""`ExperimentAnalysis`: what `tune.run` returns. It asks a `ResultGrid`, in the words of older scripts."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.core.metrics import flatten_metrics
from holdfast.errors import ConfigError, MissingExtra
from holdfast.train.paths import split_run_path
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.objective import check_mode
from holdfast.tune.result_grid import ResultGrid

if TYPE_CHECKING:
    import pandas

    from holdfast.train.result import Result

__all__ = ["ExperimentAnalysis"]


class ExperimentAnalysis:
    """The trials of an experiment. `default_metric` and `default_mode` are what `tune.run` was given.

    `experiment_checkpoint_path` is the experiment's directory; nothing is written there, and nothing is run.
    """

    def __init__(
        self,
        experiment_checkpoint_path: str | os.PathLike[str],
        *,
        storage_filesystem: object | None = None,
        trials: list[Trial] | None = None,
        default_metric: str | None = None,
        default_mode: str | None = None,
    ) -> None:
        from holdfast.tune.run_experiment import open_results

        check_mode("ExperimentAnalysis(default_mode)", default_mode, optional=True)
        grid = open_results(*split_run_path(experiment_checkpoint_path), storage_filesystem)
        self._set(grid, default_metric or grid._metric, default_mode or grid._mode)
        if trials is not None:
            self.trials = trials

    @classmethod
    def _of_results(cls, grid: ResultGrid, metric: str | None, mode: str | None) -> ExperimentAnalysis:
        """Of an experiment that was just run."""
        made = cls.__new__(cls)
        made._set(grid, metric, mode)
        return made

    def _set(self, grid: ResultGrid, metric: str | None, mode: str | None) -> None:
        self._grid = grid
        self.default_metric, self.default_mode = metric, mode
        self.trials = list(grid._trials)

    # ------------------------------------------------------------ the best

    @property
    def best_trial(self) -> Trial:
        """The trial whose last report is the best, by the metric and mode that `tune.run` was given."""
        found = self.get_best_trial(*self._default("best_trial"))
        if found is None:
            raise ConfigError(f'No trial has reported a finite number as "{self.default_metric}".')
        return found

    @property
    def best_config(self) -> dict[str, Any]:
        self._default("best_config")
        return self.best_trial.config

    @property
    def best_result(self) -> dict[str, Any]:
        """The last report of the best trial."""
        self._default("best_result")
        return self.best_trial.last_result

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The best trial's best checkpoint."""
        self._default("best_checkpoint")
        return self.get_best_checkpoint(self.best_trial)

    @property
    def best_dataframe(self) -> pandas.DataFrame:
        """All reports of the best trial."""
        self._default("best_dataframe")
        return self.trial_dataframes[self.best_trial.trial_id]

    @property
    def best_result_df(self) -> pandas.DataFrame:
        """The last report of the best trial, as a table of one row."""
        self._default("best_result_df")
        return _frame([flatten_metrics(dict(self.best_result))]).set_index("trial_id")

    def get_best_trial(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Trial | None:
        """As `ResultGrid.get_best_result`, but the trial; None if no trial has reported the metric as a number."""
        if len(self.trials) == 1:
            return self.trials[0]
        metric, mode = self._objective("get_best_trial", metric, mode)
        try:
            return self._grid._best_trial(metric, mode, scope, filter_nan_and_inf)
        except RuntimeError:
            return None

    def get_best_config(
        self, metric: str | None = None, mode: str | None = None, scope: str = "last"
    ) -> dict[str, Any] | None:
        """The configuration of `get_best_trial`."""
        found = self.get_best_trial(metric, mode, scope)
        return found.config if found is not None else None

    def get_best_checkpoint(
        self, trial: Trial, metric: str | None = None, mode: str | None = None
    ) -> Checkpoint | None:
        """Of those that are kept of this trial; without a metric the newest. None if there is none."""
        metric = metric or self.default_metric or "training_iteration"
        mode = mode or self.default_mode or "max"
        check_mode("get_best_checkpoint(mode)", mode)
        result = self._result(trial)
        if metric == "training_iteration":
            kept = [checkpoint for checkpoint, _ in result.best_checkpoints]
            return result.checkpoint if mode == "max" or not kept else kept[0]
        try:
            return result.get_best_checkpoint(metric, "max" if mode == "max" else "min")
        except RuntimeError:
            return None

    def get_last_checkpoint(
        self, trial: Trial | None = None, metric: str = "training_iteration", mode: str = "max"
    ) -> Checkpoint | None:
        """The newest checkpoint of the trial, or, if none is given, of the best one."""
        trial = trial or self.get_best_trial(metric, mode)
        return self._result(trial).checkpoint if trial is not None else None

    # ------------------------------------------------------------ all of them

    @property
    def experiment_path(self) -> str:
        return self._grid.experiment_path

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """The last reports, by trial id."""
        return {trial.trial_id: trial.last_result for trial in self.trials}

    @property
    def results_df(self) -> pandas.DataFrame:
        """The last reports, a row for each trial."""
        rows = [flatten_metrics(dict(trial.last_result)) | {"trial_id": trial.trial_id} for trial in self.trials]
        return _frame(rows).set_index("trial_id") if rows else _frame([])

    @functools.cached_property
    def trial_dataframes(self) -> dict[str, pandas.DataFrame]:
        """All reports, a table for each trial."""
        history = self._grid._all_reports()
        return {
            trial.trial_id: _frame([flatten_metrics(dict(report)) for report in history.get(trial.trial_id, ())])
            for trial in self.trials
        }

    def dataframe(self, metric: str | None = None, mode: str | None = None) -> pandas.DataFrame:
        """A row for each trial: its last report, or the one with the best value of `metric`."""
        if mode is not None and metric is None:
            raise ConfigError("dataframe(mode) needs metric: the metric that is compared.")
        return self._grid.get_dataframe(metric, mode)

    def get_all_configs(self, prefix: bool = False) -> dict[str, dict[str, Any]]:
        """The configurations, by trial id; with `prefix` flat, as `config/...`."""
        return {
            trial.trial_id: flatten_metrics({"config": trial.config}) if prefix else trial.config
            for trial in self.trials
        }

    # ------------------------------------------------------------

    def _default(self, what: str) -> tuple[str, str]:
        if not self.default_metric or not self.default_mode:
            raise ConfigError(
                f"{what} needs tune.run(metric=..., mode=...): give both there, or call get_best_trial(metric, mode)."
            )
        return self.default_metric, self.default_mode

    def _objective(self, method: str, metric: str | None, mode: str | None) -> tuple[str, str]:
        metric, mode = metric or self.default_metric, mode or self.default_mode
        if not metric or not mode:
            raise ConfigError(f"{method}(metric, mode) are needed: give them here, or to tune.run.")
        check_mode(f"{method}(mode)", mode)
        return metric, mode

    def _result(self, trial: Trial) -> Result:
        return self._grid._open_result(trial)


def _frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    try:
        import pandas
    except ModuleNotFoundError:
        raise MissingExtra("ExperimentAnalysis needs pandas for tables; run: pip install pandas") from None
    return pandas.DataFrame(rows)

"""`ResultGrid`: the results of an experiment's trials, as users of Ray Tune expect them.

The last results are in memory. A trial's `Result`, and the reports of all trials, are read from storage only where they
are asked for: an experiment may have ten thousand trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.core.metrics import find_metric, flatten_metrics
from holdfast.errors import ConfigError, MissingExtra
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.objective import Objective, check_mode, number

if TYPE_CHECKING:
    import pandas

    from holdfast.train.result import Result

__all__ = ["ResultGrid"]

_SCOPES = ("all", "last", "avg", "last-5-avg", "last-10-avg")
History = Mapping[str, Sequence[Mapping[str, Any]]]
"""All reports that count, by trial."""


class ResultGrid:
    """What an experiment returns. Index it, iterate over it, or ask for the best."""

    def __init__(
        self,
        trials: Sequence[Trial],
        open_result: Callable[[Trial], Result],
        read_history: Callable[[], History],
        *,
        experiment_path: str,
        filesystem: Any = None,
        metric: str | None = None,
        mode: str | None = None,
    ) -> None:
        self._trials = list(trials)
        self._open_result, self._read_history = open_result, read_history
        self._opened: dict[int, Result] = {}
        self._history: History | None = None
        self._metric, self._mode = metric, mode
        self._path, self._filesystem = experiment_path, filesystem

    @property
    def experiment_path(self) -> str:
        """The experiment's directory: a local path, or `bucket/prefix` on remote storage."""
        return self._path

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` on which it lies."""
        return self._filesystem

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, index: int) -> Result:
        index = range(len(self._trials))[index]
        if index not in self._opened:
            self._opened[index] = self._open_result(self._trials[index])
        return self._opened[index]

    def __iter__(self) -> Iterator[Result]:
        return (self[index] for index in range(len(self)))

    @property
    def errors(self) -> list[Exception]:
        """Why trials failed."""
        return [trial.error for trial in self._trials if trial.error is not None]

    @property
    def num_errors(self) -> int:
        """How many trials failed."""
        return sum(trial.status == Trial.ERROR for trial in self._trials)

    @property
    def num_terminated(self) -> int:
        """How many trials ended without an error."""
        return sum(trial.status == Trial.TERMINATED for trial in self._trials)

    def get_best_result(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Result:
        """Of the trial with the best value of `metric`; nested ones are `a/b`.

        Trials are compared by their last report that has it, with `scope="avg"` by the mean of all, with "last-5-avg"
        and "last-10-avg" by the mean of the last ones, with "all" by their best. Not-a-number, and with
        `filter_nan_and_inf` infinities, never win.
        """
        if len(self._trials) == 1 and not metric and not self._metric:
            return self[0]
        objective = self._objective("get_best_result", metric, mode)
        return self[self._best_index(objective, scope, filter_nan_and_inf)]

    def _best_trial(self, metric: str, mode: str, scope: str, filter_nan_and_inf: bool) -> Trial:
        return self._trials[self._best_index(Objective(metric, mode), scope, filter_nan_and_inf)]

    def _best_index(self, objective: Objective, scope: str, filter_nan_and_inf: bool) -> int:
        if scope not in _SCOPES:
            raise ConfigError(f"get_best_result(scope) must be one of {', '.join(_SCOPES)}, not {scope!r}.")
        best, best_score, found = -1, -math.inf, False
        for index, trial in enumerate(self._trials):
            value = self._value(trial, objective, scope)
            if value is None:
                continue
            found = True
            if math.isnan(value) or (filter_nan_and_inf and math.isinf(value)):
                continue
            score = objective.score_of(value)
            if best < 0 or score > best_score:
                best, best_score = index, score
        if best < 0 and not found:
            raise self._nobody_reported(objective)
        if best < 0:
            raise RuntimeError(
                f'No best trial found for the metric "{objective.metric}": all that was reported of it is not a finite '
                "number."
            )
        return best

    def get_dataframe(self, filter_metric: str | None = None, filter_mode: str | None = None) -> pandas.DataFrame:
        """A row for each trial: its last report, or the one with the best value of `filter_metric`, if that is given.
        The configuration is in columns `config/...`, the trial's directory in `logdir`."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise MissingExtra("ResultGrid.get_dataframe needs pandas; run: pip install pandas") from None
        objective = None
        if filter_metric is not None:
            check_mode("get_dataframe(filter_mode), which filter_metric needs,", filter_mode)
            assert filter_mode is not None
            objective = Objective(filter_metric, filter_mode)
        rows = []
        for trial in self._trials:
            shown = self._best_report(trial, objective) if objective else trial.last_result
            row = {key: value for key, value in shown.items() if key != "config"}
            flat = flatten_metrics(row) | {"trial_id": trial.trial_id}
            config = flatten_metrics({"config": trial.config})
            rows.append(flat | config | {"logdir": trial.path})
        return pandas.DataFrame(rows)

    def best_over_time(self, metric: str | None = None, mode: str | None = None) -> list[tuple[float, float]]:
        """Each improvement of the metric over all trials: seconds since the first report, and the new best value."""
        objective = self._objective("best_over_time", metric, mode)
        reports = sorted(
            (float(report["timestamp"]), number(value, objective.metric))
            for history in self._all_reports().values()
            for report in history
            if (value := find_metric(report, objective.metric)) is not None
        )
        if not reports:
            raise self._nobody_reported(objective)
        found: list[tuple[float, float]] = []
        for at, value in reports:
            if math.isfinite(value) and (not found or objective.score_of(value) > objective.score_of(found[-1][1])):
                found.append((at - reports[0][0], value))
        return found

    def plot(self, metric: str | None = None, mode: str | None = None, ax: Any = None) -> Any:
        """Draw the best value over time, on `ax` or a new figure of matplotlib's; returns the axes."""
        objective = self._objective("plot", metric, mode)
        improvements = self.best_over_time(metric, mode)
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError:
            raise MissingExtra("ResultGrid.plot needs matplotlib; run: pip install 'holdfast[plot]'") from None
        if ax is None:
            _, ax = pyplot.subplots()
        ax.step([at for at, _ in improvements], [value for _, value in improvements], where="post", marker="o")
        ax.set_xlabel("seconds since the first report")
        ax.set_ylabel(f"{'lowest' if objective.mode == 'min' else 'highest'} {objective.metric}")
        return ax

    def __repr__(self) -> str:
        return f"ResultGrid<{len(self)} trials, {self.num_terminated} terminated, {self.num_errors} failed>"

    # ------------------------------------------------------------

    def _objective(self, method: str, metric: str | None, mode: str | None) -> Objective:
        metric, mode = metric or self._metric, mode or self._mode
        if not metric:
            raise ConfigError(
                f"{method}(metric) is needed to compare trials: give it here or as TuneConfig(metric=...)."
            )
        if mode is None:
            raise ConfigError(f"{method}(mode) is needed to compare trials: give it here or as TuneConfig(mode=...).")
        check_mode(f"{method}(mode)", mode)
        return Objective(metric, mode)

    def _all_reports(self) -> History:
        if self._history is None:
            self._history = self._read_history()
        return self._history

    def _value(self, trial: Trial, objective: Objective, scope: str) -> float | None:
        """By what the trial is compared; None if it never reported the metric."""
        last = find_metric(trial.last_result, objective.metric)
        if scope == "last" and (last is not None or not trial.last_result):
            return None if last is None else number(last, objective.metric)
        found = (find_metric(report, objective.metric) for report in self._all_reports().get(trial.trial_id, ()))
        values = [number(value, objective.metric) for value in found if value is not None]
        if not values:
            return None
        if scope == "last":
            return values[-1]  # which the last report lacks
        if scope == "all":
            return max(values, key=objective.score_of)
        if scope != "avg":
            values = values[-int(scope.split("-")[1]) :]
        return sum(values) / len(values)

    def _best_report(self, trial: Trial, objective: Objective) -> Mapping[str, Any]:
        reports = [one for one in self._all_reports().get(trial.trial_id, ()) if objective.score(one) is not None]
        return max(reports, key=lambda one: objective.score(one) or 0.0, default={})

    def _nobody_reported(self, objective: Objective) -> RuntimeError:
        names = {name for trial in self._trials for name in flatten_metrics(dict(trial.last_result))}
        return RuntimeError(
            f'No best trial found for the metric "{objective.metric}": no trial has reported it; they reported: '
            f"{', '.join(sorted(names)) or 'nothing'}."
        )

"""The table of an experiment's trials, as lines of text: about ten of them, with the parameters in which they differ.

Pure text; `progress` and `CLIReporter` show it. It is told of each trial once, so that it can be drawn several times a
second: what it costs does not grow with the number of trials but for the choice of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from holdfast.core.metrics import find_metric, flatten_metrics
from holdfast.errors import ConfigError
from holdfast.printable import printable
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.objective import Objective
from holdfast.views.formatting import count_text, metric_text, running_time, trim
from holdfast.views.terminal.box import columns_of

__all__ = ["TrialTable", "best_trial", "estimate_left_s", "status_counts", "trial_score"]

_ORDER = (Trial.RUNNING, Trial.PAUSED, Trial.PENDING, Trial.TERMINATED, Trial.ERROR)
_NAME_LENGTH = 40
_ADDED = frozenset(
    ("timestamp", "time_this_iter_s", "time_total_s", "trial_id", "training_iteration", "done", "config")
)
"""Of a result: what is no metric of the user's, or has a column of its own."""


class TrialTable:
    """`metrics` and `parameters` are columns, from names to titles; without them there is the objective's metric (or
    the first few that are reported), and every parameter in which trials differ."""

    def __init__(
        self,
        objective: Objective | None = None,
        *,
        metrics: Mapping[str, str] | None = None,
        parameters: Mapping[str, str] | None = None,
        total_trials: int | None = None,
        column_length: int = 20,
        inferred_metrics: int = 3,
        sort_by_metric: bool = False,
    ) -> None:
        self.objective = objective
        self._metrics, self._parameters = metrics, parameters
        self._total = total_trials
        self._length = column_length
        self._inferred_metrics = inferred_metrics
        self._sort_by_metric = sort_by_metric
        self._known: dict[str, Any] = {}
        """The first trial's value of each parameter."""
        self._varying: dict[str, None] = {}
        self._trials = 0

    def add(self, trial: Trial) -> None:
        """A trial that was not there before."""
        flat = flatten_metrics(trial.config)
        for name, value in flat.items():
            if name not in self._known:
                self._known[name] = value
                if self._trials:
                    self._varying[name] = None
            elif name not in self._varying and not _same(self._known[name], value):
                self._varying[name] = None
        self._trials += 1

    def lines(
        self,
        trials: Collection[Trial],
        *,
        elapsed_s: float,
        rows_max: int = 10,
        width: int = 160,
        resources: str = "",
        best: Trial | None = None,
        left_s: float | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> list[str]:
        """The summary, the heads, and a line for each trial that is shown. What is not given is found out."""
        counts = Counter(trial.status for trial in trials) if counts is None else counts
        if best is None and self.objective is not None:
            best = best_trial(trials, self.objective)
        shown = self._choose(trials, rows_max, best)
        head = [status_counts(counts, self._total), running_time(elapsed_s)]
        if left_s is not None:
            head.append(f"about {running_time(left_s)} left")
        if resources:
            head.append(resources)
        lines = [_cut(", ".join(head), width)]
        if best is not None and self.objective is not None:
            lines.append(_cut(f"best so far: {self._describe(best)}", width))
        if shown:
            lines += _grid([self._heads(shown), *(self._row(trial, shown, trial is best) for trial in shown)], width)
        if (left_out := len(trials) - len(shown)) > 0:
            lines.append(_cut(f"and {left_out:,} more {'trial' if left_out == 1 else 'trials'}", width))
        return lines

    # ------------------------------------------------------------ rows

    def _choose(self, trials: Collection[Trial], rows_max: int, best: Trial | None) -> list[Trial]:
        """Those that run, the best, and the newest of the others; each kind of status together."""
        by_status: dict[str, list[Trial]] = {}
        for trial in reversed(list(trials)):
            group = by_status.setdefault(trial.status, [])
            if len(group) < rows_max:
                group.append(trial)
        chosen = [trial for status in _ORDER for trial in by_status.get(status, ())][:rows_max]
        if best is not None and chosen and best not in chosen:
            chosen[-1] = best
        if self._sort_by_metric and self.objective is not None:
            objective = self.objective
            chosen.sort(key=lambda trial: trial_score(objective, trial), reverse=True)
        return chosen

    def _heads(self, shown: Sequence[Trial]) -> list[str]:
        titles = [*self._parameter_columns().values(), *self._metric_columns(shown).values()]
        return ["", "trial", "status", *(trim(title, self._length) for title in titles), "iter", "time"]

    def _row(self, trial: Trial, shown: Sequence[Trial], is_best: bool) -> list[str]:
        flat = flatten_metrics(trial.config)
        values = [flat.get(name, "") for name in self._parameter_columns()]
        values += [_or_empty(find_metric(trial.last_result, name)) for name in self._metric_columns(shown)]
        total_s = trial.last_result.get("time_total_s")
        return [
            "*" if is_best else "",
            trim(_name(trial), _NAME_LENGTH),
            trial.status,
            *(metric_text(value, self._length) for value in values),
            str(trial.last_result.get("training_iteration", 0)),
            running_time(total_s) if isinstance(total_s, int | float) else "",
        ]

    def _parameter_columns(self) -> Mapping[str, str]:
        if self._parameters:
            return self._parameters
        return {name: printable(name.rpartition("/")[2]) for name in (self._varying or {})}

    def _metric_columns(self, shown: Sequence[Trial]) -> Mapping[str, str]:
        if self._metrics:
            return self._metrics
        if self.objective is not None:
            return {self.objective.metric: printable(self.objective.metric)}
        names: dict[str, str] = {}
        for trial in shown:
            for name, value in flatten_metrics(dict(trial.last_result)).items():
                is_own = name not in _ADDED and not name.startswith("config/")
                if is_own and isinstance(value, int | float) and len(names) < self._inferred_metrics:
                    names.setdefault(name, printable(name))
        return names

    def _describe(self, trial: Trial) -> str:
        assert self.objective is not None
        metric = self.objective.metric
        value = metric_text(find_metric(trial.last_result, metric))
        flat = flatten_metrics(trial.config)
        drawn = " ".join(
            f"{title}={metric_text(flat[name])}" for name, title in self._parameter_columns().items() if name in flat
        )
        return f"{printable(_name(trial))}, {metric} {value}" + (f" with {drawn}" if drawn else "")


def status_counts(counts: Mapping[str, int], total: int | None = None) -> str:
    """3 RUNNING, 5 TERMINATED of 20 trials."""
    told = ", ".join(f"{counts[status]} {status}" for status in _ORDER if counts.get(status))
    of = f" of {count_text(total, 'trial', grouped=True)}" if total is not None else ""
    return (told or "no trial yet") + of


def best_trial(trials: Collection[Trial], objective: Objective) -> Trial | None:
    """The trial whose last report is the best; None if none has reported the metric as a number."""
    best, best_score = None, float("-inf")
    for trial in trials:
        score = trial_score(objective, trial)
        if score > best_score:
            best, best_score = trial, score
    return best


def estimate_left_s(finished: int, total: int | None, elapsed_s: float) -> float | None:
    """How long the trials that are left take if they end as often as those before; None if nobody can tell."""
    if total is None or not 0 < finished <= total:
        return None
    return elapsed_s * (total - finished) / finished


def trial_score(objective: Objective, trial: Trial) -> float:
    """Of its last report: higher is better, minus infinity where there is no number."""
    try:
        score = objective.score(trial.last_result)
    except ConfigError:  # it is no number
        return float("-inf")
    return float("-inf") if score is None else score


def _name(trial: Trial) -> str:
    return str(getattr(trial, "name", "") or trial.trial_id)


def _or_empty(value: Any) -> Any:
    return "" if value is None else value


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001  arrays, and whatever an __eq__ of the user's raises
        return one is other


def _grid(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Columns below each other; those that do not fit are left out, the last ones stay."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(columns_of(row[at]) for row in rows) for at in range(len(rows[0]))]
    kept = list(range(len(widths)))
    while len(kept) > 5 and sum(widths[at] + 2 for at in kept) - 2 > width:
        del kept[-4]  # before the last metric, the iteration and the time
    return [
        _cut("  ".join(row[at] + " " * (widths[at] - columns_of(row[at])) for at in kept).rstrip(), width)
        for row in rows
    ]


def _cut(text: str, width: int) -> str:
    while columns_of(text) > width:
        text = text[:-1]
    return text

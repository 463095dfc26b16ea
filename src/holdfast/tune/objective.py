"""What is optimised: one metric and whether more or less of it is better. Schedulers, searchers and results share it.

Scores are turned so that higher is better. Not-a-number ranks worst in both modes: a diverged trial never wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.core.metrics import find_metric, flatten_metrics
from holdfast.errors import ConfigError

__all__ = ["ADDED_METRICS", "Objective", "check_metric", "check_mode", "find_objective", "number", "require_metric"]

ADDED_METRICS = frozenset(("timestamp", "time_this_iter_s", "time_total_s", "training_iteration"))
"""What every result has besides what was reported, and a searcher may look for."""


class Objective(NamedTuple):
    """A metric (nested ones are named `a/b`) and a mode, "min" or "max"."""

    metric: str
    mode: str

    def score(self, result: Mapping[str, Any]) -> float | None:
        """Higher is better; None where the result lacks the metric, minus infinity where it is not a number."""
        value = find_metric(result, self.metric)
        if value is None:
            return None
        return self.score_of(number(value, self.metric))

    def score_of(self, value: float) -> float:
        if math.isnan(value):
            return -math.inf
        return value if self.mode == "max" else -value


def find_objective(metric: Any, mode: Any) -> Objective | None:
    """What a metric and a mode, as users give them, say together; None if one is missing."""
    return Objective(metric, mode) if isinstance(metric, str) and isinstance(mode, str) and metric and mode else None


def require_metric(metric: str, reported: Mapping[str, Any], trial: str) -> None:
    """Raise, naming what was reported, if the metric is not among that, nor among what is added to reports."""
    if find_metric(reported, metric) is None and metric not in ADDED_METRICS:
        names = ", ".join(sorted(flatten_metrics(dict(reported)))) or "nothing"
        raise ConfigError(
            f'Trial {trial} reported no metric "{metric}", by which trials are compared: report it, or name one of '
            f"these in TuneConfig(metric=...): {names}."
        )


def number(value: Any, metric: str) -> float:
    """A metric's value as a float; scalars of numpy and torch have one."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f'The metric "{metric}" must be a number to be compared, but {value!r} was reported.'
        ) from None


def check_mode(what: str, mode: Any, *, optional: bool = False) -> None:
    if mode not in ("min", "max") and not (optional and mode is None):
        raise ConfigError(f'{what} must be "min" or "max", not {mode!r}.')


def check_metric(what: str, metric: Any, *, optional: bool = False) -> None:
    if not (isinstance(metric, str) and metric) and not (optional and metric is None):
        raise ConfigError(f'{what} must be a metric\'s name, such as "loss", not {metric!r}.')

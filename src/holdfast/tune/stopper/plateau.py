"""Stoppers for when nothing improves any more: of one trial, and of the experiment."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from typing import Any

from holdfast.core.metrics import find_metric
from holdfast.errors import ConfigError
from holdfast.tune.objective import Objective, check_metric, check_mode, number
from holdfast.tune.stopper.stopper import Stopper

__all__ = ["ExperimentPlateauStopper", "TrialPlateauStopper"]


class TrialPlateauStopper(Stopper):
    """Stops a trial when its last `num_results` values of `metric` have a standard deviation of at most `std`, not
    before it has reported `grace_period` times, nor before the metric has passed `metric_threshold`, if that is given:
    above it with mode "max", below it with "min"."""

    def __init__(
        self,
        metric: str,
        std: float = 0.01,
        num_results: int = 4,
        grace_period: int = 4,
        metric_threshold: float | None = None,
        mode: str | None = None,
    ) -> None:
        check_metric("TrialPlateauStopper(metric)", metric)
        if metric_threshold is not None:
            check_mode("TrialPlateauStopper(mode), which metric_threshold needs,", mode)
        _check_whole("TrialPlateauStopper(num_results)", num_results, least=1)
        self._metric, self._std, self._num_results, self._grace = metric, std, num_results, grace_period
        self._threshold, self._mode = metric_threshold, mode
        self._values: dict[str, list[float]] = {}
        """The last values of each trial."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        reported = find_metric(result, self._metric)
        if reported is None:
            return False
        value = number(reported, self._metric)
        values = self._values.setdefault(trial_id, [])
        values.append(value)
        del values[: -self._num_results]
        if result["training_iteration"] < self._grace or len(values) < self._num_results:
            return False
        if self._threshold is not None and (
            value > self._threshold if self._mode == "min" else value < self._threshold
        ):
            return False
        return _standard_deviation(values) <= self._std

    def stop_all(self) -> bool:
        return False

    def get_state(self) -> dict[str, Any]:
        return {"values": {trial_id: list(values) for trial_id, values in self._values.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        self._values = {trial_id: list(values) for trial_id, values in state["values"].items()}


class ExperimentPlateauStopper(Stopper):
    """Stops the experiment when the `top` best values of `metric`, over all trials, have had a standard deviation of at
    most `std` for more than `patience` results."""

    def __init__(self, metric: str, std: float = 0.001, top: int = 10, mode: str = "min", patience: int = 0) -> None:
        check_metric("ExperimentPlateauStopper(metric)", metric)
        check_mode("ExperimentPlateauStopper(mode)", mode)
        _check_whole("ExperimentPlateauStopper(top)", top, least=2)
        _check_whole("ExperimentPlateauStopper(patience)", patience, least=0)
        if isinstance(std, bool) or not isinstance(std, float | int) or not std > 0:
            raise ConfigError(f"ExperimentPlateauStopper(std) must be a number above 0, not {std!r}.")
        self._objective = Objective(metric, mode)
        self._std, self._top, self._patience = std, top, patience
        self._best: list[float] = []
        """The best scores, ascending."""
        self._unchanged = 0
        """For how many results they have been close to each other."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        score = self._objective.score(result)
        if score is not None:
            insort(self._best, score)
            del self._best[: -self._top]
            self._unchanged = self._unchanged + 1 if self.has_plateaued() else 0
        return self.stop_all()

    def has_plateaued(self) -> bool:
        return len(self._best) == self._top and _standard_deviation(self._best) <= self._std

    def stop_all(self) -> bool:
        return self._unchanged > self._patience

    def get_state(self) -> dict[str, Any]:
        return {"best": list(self._best), "unchanged": self._unchanged}

    def set_state(self, state: dict[str, Any]) -> None:
        self._best, self._unchanged = list(state["best"]), state["unchanged"]


def _standard_deviation(values: Sequence[float]) -> float:
    """Of these values alone; not-a-number where one of them is not finite."""
    mean = sum(values) / len(values)
    if not math.isfinite(mean):
        return math.nan
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def _check_whole(what: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be a whole number of {least} or more, not {value!r}.")

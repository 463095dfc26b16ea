"""Stoppers for fixed limits: so much of a metric, so many iterations, so much time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from holdfast import runtime
from holdfast.core.metrics import find_metric, flatten_metrics
from holdfast.errors import ConfigError
from holdfast.tune.objective import number
from holdfast.tune.stopper.stopper import Stopper

__all__ = ["DictStopper", "MaximumIterationStopper", "TimeoutStopper"]


class DictStopper(Stopper):
    """What `RunConfig(stop={...})` becomes: a trial stops when one of these metrics is at or above its value."""

    def __init__(self, criteria: Mapping[str, float]) -> None:
        for metric, value in criteria.items():
            if not isinstance(metric, str) or isinstance(value, bool | str) or value is None:
                raise ConfigError(f"RunConfig(stop) must map metrics to numbers; {metric!r}: {value!r} does not.")
        self._criteria = {metric: number(value, metric) for metric, value in criteria.items()}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        stops = False
        for metric, limit in self._criteria.items():
            value = find_metric(result, metric)
            if value is None:
                names = ", ".join(sorted(flatten_metrics(result))) or "nothing"
                raise ConfigError(
                    f'RunConfig(stop) names the metric "{metric}", which trial {trial_id} has not reported: report it '
                    f"each time, or name one of these: {names}."
                )
            stops = stops or number(value, metric) >= limit
        return stops

    def stop_all(self) -> bool:
        return False


class MaximumIterationStopper(Stopper):
    """Stops a trial at its `max_iter`th report. A report that a trial repeats after a failure is not counted twice."""

    def __init__(self, max_iter: int) -> None:
        if isinstance(max_iter, bool) or not isinstance(max_iter, int) or max_iter < 1:
            raise ConfigError(
                f"MaximumIterationStopper(max_iter) must be a whole number of 1 or more, not {max_iter!r}."
            )
        self._max_iter = max_iter

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return bool(result["training_iteration"] >= self._max_iter)

    def stop_all(self) -> bool:
        return False


class TimeoutStopper(Stopper):
    """Stops the experiment after `timeout` seconds (or a timedelta) of running. Time between its drivers is not
    counted."""

    def __init__(self, timeout: float | timedelta) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ConfigError(f"TimeoutStopper(timeout) must be a number of seconds above 0, not {timeout!r}.")
        self._timeout_s = float(seconds)
        self._before_s = 0.0
        """How long earlier drivers ran."""
        self._since: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Since it was first asked."""
        return self._before_s + (0.0 if self._since is None else runtime.current().monotonic() - self._since)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        if self._since is None:
            self._since = runtime.current().monotonic()
        return self.elapsed_s >= self._timeout_s

    def resume_after(self, elapsed_s: float) -> None:
        self._before_s, self._since = elapsed_s, None

    def get_state(self) -> dict[str, Any]:
        return {"elapsed_s": self.elapsed_s}

    def set_state(self, state: dict[str, Any]) -> None:
        self.resume_after(state["elapsed_s"])

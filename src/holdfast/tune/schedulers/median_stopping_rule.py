"""`MedianStoppingRule`: stops a trial whose best result is worse than the median of the others' running means.

After Golovin et al., Google Vizier (2017). Of each trial the results are kept as prefix sums, so that a mean up to any
time is one search; a decision costs in proportion to the number of trials.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from statistics import median
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.schedulers.trial_scheduler import ComparingScheduler, TrialScheduler, TuneController

__all__ = ["MedianStoppingRule"]


class _Curve:
    """A trial's results in order of time: the best score, and sum and number of those in the mean, up to each."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.bests: list[float] = []
        self.sums: list[float] = []
        self.counts: list[int] = []

    def add(self, time: float, score: float, *, counts: bool) -> None:
        """A trial that went back to a checkpoint reports the same times again: the later report counts."""
        at = bisect_left(self.times, time)
        for values in (self.times, self.bests, self.sums, self.counts):
            del values[at:]
        self.times.append(time)
        self.bests.append(max(self.bests[-1], score) if at else score)
        self.sums.append((self.sums[-1] if at else 0.0) + (score if counts else 0.0))
        self.counts.append((self.counts[-1] if at else 0) + counts)

    def mean(self, time: float) -> float | None:
        """Up to that time; None where nothing counts."""
        at = bisect_right(self.times, time) - 1
        return self.sums[at] / self.counts[at] if at >= 0 and self.counts[at] else None


class MedianStoppingRule(ComparingScheduler):
    """Trials younger than `grace_period` are never stopped, nor any before `min_samples_required` others are as old;
    means begin there.

    As long as there are too few, a trial that has run for `min_time_slice` yields to those that wait, if that is not 0.
    Without `hard_stop`, trials are paused instead, and run on when nothing else is left.
    """

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        grace_period: float = 60.0,
        min_samples_required: int = 3,
        min_time_slice: float = 0,
        hard_stop: bool = True,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        for what, value, least in (
            ("grace_period", grace_period, 0),
            ("min_samples_required", min_samples_required, 1),
            ("min_time_slice", min_time_slice, 0),
        ):
            if not value >= least:
                raise ConfigError(f"MedianStoppingRule({what}) must be {least} or more, not {value!r}.")
        self._grace, self._least, self._slice, self._hard = (
            grace_period,
            min_samples_required,
            min_time_slice,
            hard_stop,
        )
        self._curves: dict[str, _Curve] = {}
        self._stopped: set[str] = set()
        """Trials that were worse once; if they were only paused, they run to their end."""
        self._paused_at: dict[str, float] = {}

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        measured = self.time_and_score(result)
        if measured is None or trial.trial_id in self._stopped:
            return TrialScheduler.CONTINUE
        time, score = measured
        curve = self._curves.setdefault(trial.trial_id, _Curve())
        curve.add(time, score, counts=time >= self._grace and math.isfinite(score))
        if time < self._grace:
            return TrialScheduler.CONTINUE
        others = (other.mean(time) for other in self._curves.values() if other is not curve and other.times[-1] >= time)
        means = [mean for mean in others if mean is not None]
        if len(means) < self._least:
            return self._yield_to_others(tune_controller, trial, time)
        if curve.bests[-1] >= median(means):
            return TrialScheduler.CONTINUE
        self._stopped.add(trial.trial_id)
        return TrialScheduler.STOP if self._hard else TrialScheduler.PAUSE

    def _yield_to_others(self, tune_controller: TuneController, trial: Trial, time: float) -> str:
        if not self._slice or time - self._paused_at.get(trial.trial_id, 0.0) <= self._slice:
            return TrialScheduler.CONTINUE
        if not any(other.status in (Trial.PENDING, Trial.PAUSED) for other in tune_controller.get_live_trials()):
            return TrialScheduler.CONTINUE
        self._paused_at[trial.trial_id] = time
        return TrialScheduler.PAUSE

    def debug_string(self) -> str:
        return f"MedianStoppingRule: {len(self._stopped)} trials were worse than the median"

    def get_state(self) -> dict[str, Any]:
        return {
            "curves": {
                trial_id: [list(curve.times), list(curve.bests), list(curve.sums), list(curve.counts)]
                for trial_id, curve in self._curves.items()
            },
            "stopped": sorted(self._stopped),
            "paused_at": dict(self._paused_at),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._curves = {}
        for trial_id, lists in state["curves"].items():
            curve = self._curves[trial_id] = _Curve()
            curve.times, curve.bests, curve.sums, curve.counts = (list(one) for one in lists)
        self._stopped, self._paused_at = set(state["stopped"]), dict(state["paused_at"])

"""`AsyncHyperBandScheduler` (ASHA): a trial that reaches a milestone goes on if it is among the best so far there.

Nobody waits for anybody (Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020). A milestone is
reached by the first result at or beyond it; one that passes several counts at the last of them. Each milestone keeps
its scores sorted, so a decision costs the same after ten thousand trials.
"""

from __future__ import annotations

import math
from bisect import insort
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.schedulers.trial_scheduler import ComparingScheduler, TrialScheduler, TuneController
from holdfast.tune.search.random_state import seeded

__all__ = ["ASHAScheduler", "AsyncHyperBandScheduler"]


class AsyncHyperBandScheduler(ComparingScheduler):
    """Stops all but the best `1 / reduction_factor` of trials at each milestone: `grace_period`, and
    `reduction_factor` times as much each time, up to `max_t`, where trials stop if `stop_last_trials`.

    With several `brackets`, trials are spread over as many sequences of milestones; each begins a step later.
    """

    def __init__(
        self,
        time_attr: str = "training_iteration",
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 100,
        grace_period: float = 1,
        reduction_factor: float = 4,
        brackets: int = 1,
        stop_last_trials: bool = True,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        name = type(self).__name__
        if not max_t > 0:
            raise ConfigError(f"{name}(max_t) must be above 0, not {max_t!r}.")
        if not 0 < grace_period <= max_t:
            raise ConfigError(
                f"{name}(grace_period) must be above 0 and at most max_t={max_t!r}, not {grace_period!r}."
            )
        if not reduction_factor > 1:
            raise ConfigError(f"{name}(reduction_factor) must be above 1, not {reduction_factor!r}.")
        if isinstance(brackets, bool) or not isinstance(brackets, int) or brackets < 1:
            raise ConfigError(f"{name}(brackets) must be a whole number of 1 or more, not {brackets!r}.")
        self._max_t, self._factor, self._stop_last = max_t, reduction_factor, stop_last_trials
        self._milestones = [_milestones(grace_period, max_t, reduction_factor, skip) for skip in range(brackets)]
        self._scores: list[list[list[float]]] = [[[] for _ in steps] for steps in self._milestones]
        """By bracket and milestone, ascending."""
        self._places: dict[str, tuple[int, int]] = {}
        """By trial: its bracket, and its next milestone."""
        self._added = 0

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        self._places[trial.trial_id] = (self._choose_bracket(), 0)
        self._added += 1

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        measured = self.time_and_score(result)
        if measured is None:
            return TrialScheduler.CONTINUE
        time, score = measured
        goes_on = self._compare(trial.trial_id, time, score)
        if time >= self._max_t and self._stop_last:
            return TrialScheduler.STOP
        return TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP

    def on_trial_complete(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> None:
        """A trial that ends early still counts at the milestone that it has reached."""
        measured = self.time_and_score(result) if result else None
        if measured is not None and trial.trial_id in self._places:
            self._compare(trial.trial_id, *measured)
        self._places.pop(trial.trial_id, None)

    def on_trial_error(self, tune_controller: TuneController, trial: Trial) -> None:
        self._places.pop(trial.trial_id, None)

    def on_trial_remove(self, tune_controller: TuneController, trial: Trial) -> None:
        self._places.pop(trial.trial_id, None)

    def debug_string(self) -> str:
        counts = [
            ", ".join(f"{milestone:g}: {len(scores)}" for milestone, scores in zip(steps, known, strict=True))
            for steps, known in zip(self._milestones, self._scores, strict=True)
        ]
        return f"{type(self).__name__}: trials at milestone {' | '.join(counts)}"

    def get_state(self) -> dict[str, Any]:
        return {
            "scores": [[list(scores) for scores in known] for known in self._scores],
            "places": {trial_id: list(place) for trial_id, place in self._places.items()},
            "added": self._added,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._scores = [[list(scores) for scores in known] for known in state["scores"]]
        self._places = {trial_id: (bracket, step) for trial_id, (bracket, step) in state["places"].items()}
        self._added = state["added"]

    def _compare(self, trial_id: str, time: float, score: float) -> bool:
        """Enter the score at the last milestone that is reached anew; whether it is good enough there."""
        bracket, step = self._places[trial_id]
        milestones = self._milestones[bracket]
        if step == len(milestones) or time < milestones[step]:
            return True
        while step + 1 < len(milestones) and time >= milestones[step + 1]:
            step += 1
        known = self._scores[bracket][step]
        goes_on = not known or score >= _quantile(known, 1 - 1 / self._factor)
        insort(known, score)
        self._places[trial_id] = (bracket, step + 1)
        return goes_on

    def _choose_bracket(self) -> int:
        """At random, the more likely the more milestones a bracket has."""
        if len(self._milestones) == 1:
            return 0
        weights = [math.exp(len(steps)) for steps in self._milestones]
        return seeded(self.seed, "bracket", self._added).choices(range(len(weights)), weights)[0]


ASHAScheduler = AsyncHyperBandScheduler


def _milestones(first: float, last: float, factor: float, skip: int) -> list[float]:
    found = []
    milestone = first * factor**skip
    while milestone <= last * (1 + 1e-9):
        found.append(milestone)
        milestone *= factor
    return found


def _quantile(ascending: list[float], share: float) -> float:
    """Between two values in proportion, as numpy's percentile is."""
    place = (len(ascending) - 1) * share
    below, above = ascending[math.floor(place)], ascending[math.ceil(place)]
    if below == above:  # infinities too
        return below
    return below + (above - below) * (place - math.floor(place))

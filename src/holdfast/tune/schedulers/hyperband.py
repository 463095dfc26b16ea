"""`HyperBandScheduler`: successive halving in brackets. Trials pause at a milestone until all of their bracket are
there; the best go on from their checkpoints, the others stop.

After Li et al., Hyperband (2018). A bracket takes trials until it has as many as it needs; the bracket with the most
trials and the shortest first milestone comes first, then the next, and so on round and round. No bracket waits for
ever: a trial that ends leaves it, and one that gets no more trials is closed when nothing else can run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.schedulers.trial_scheduler import ComparingScheduler, TrialScheduler, TuneController

__all__ = ["HyperBandScheduler"]


@dataclass
class _Bracket:
    capacity: int
    milestones: list[float]
    size: int = 0
    """How many trials it was given."""
    closed: bool = False
    """Whether it takes no more."""
    step: int = 0
    """Which milestone its trials are on their way to."""
    live: dict[str, float | None] = field(default_factory=dict)
    """By trial that has not ended: its score at that milestone, once it is there."""


class HyperBandScheduler(ComparingScheduler):
    """`max_t` is how long a trial may run, in units of `time_attr`; it stops there if `stop_last_trials`. At each
    milestone the best `1 / reduction_factor` of a bracket go on. Trials should report checkpoints: one that is paused
    without any starts over."""

    def __init__(
        self,
        time_attr: str = "training_iteration",
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 81,
        reduction_factor: float = 3,
        stop_last_trials: bool = True,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        if not max_t > 0:
            raise ConfigError(f"HyperBandScheduler(max_t) must be above 0, not {max_t!r}.")
        if not reduction_factor > 1:
            raise ConfigError(f"HyperBandScheduler(reduction_factor) must be above 1, not {reduction_factor!r}.")
        self._max_t, self._factor, self._stop_last = max_t, reduction_factor, stop_last_trials
        self._halvings = max(0, math.floor(math.log(max_t, reduction_factor) + 1e-9))
        """Of the longest bracket."""
        self._brackets: list[_Bracket] = []
        self._homes: dict[str, int] = {}
        """By trial that has not ended: the number of its bracket."""

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        if not self._brackets or self._brackets[-1].closed:
            self._brackets.append(self._make_bracket(len(self._brackets)))
        bracket = self._brackets[-1]
        bracket.live[trial.trial_id] = None
        bracket.size += 1
        bracket.closed = bracket.size == bracket.capacity
        self._homes[trial.trial_id] = len(self._brackets) - 1

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        measured = self.time_and_score(result)
        if measured is None:
            return TrialScheduler.CONTINUE
        time, score = measured
        if time >= self._max_t and self._stop_last:
            return TrialScheduler.STOP
        bracket = self._brackets[self._homes[trial.trial_id]]
        if bracket.step == len(bracket.milestones) or time < bracket.milestones[bracket.step]:
            return TrialScheduler.CONTINUE
        bracket.live[trial.trial_id] = score
        if not self._is_complete(bracket):
            return TrialScheduler.PAUSE
        worse = self._halve(bracket)
        for other in tune_controller.get_live_trials():
            if other is not trial:
                self._apply(tune_controller, bracket, other, worse)
        return TrialScheduler.STOP if trial.trial_id in worse else TrialScheduler.CONTINUE

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        """Those of the earliest bracket first, so that brackets end. Paused trials wait for their bracket."""
        pending = [trial for trial in tune_controller.get_live_trials() if trial.status == Trial.PENDING]
        return min(pending, key=lambda trial: self._homes.get(trial.trial_id, 0), default=None)

    def on_idle(self, tune_controller: TuneController) -> None:
        """No more trials come to fill the last bracket: go on with those that it has."""
        if self._brackets and not self._brackets[-1].closed:
            self._brackets[-1].closed = True
            self._advance(tune_controller, self._brackets[-1])

    def state(self) -> dict[str, int]:
        """How many brackets there are, and how many trials in them have not ended."""
        return {"num_brackets": len(self._brackets), "num_live_trials": len(self._homes)}

    def debug_string(self) -> str:
        parts = [
            f"{len(bracket.live)} of {bracket.size} trials to {bracket.milestones[bracket.step]:g}"
            for bracket in self._brackets
            if bracket.live and bracket.step < len(bracket.milestones)
        ]
        return f"HyperBandScheduler: {'; '.join(parts) or 'no open bracket'}"

    def get_state(self) -> dict[str, Any]:
        return {
            "brackets": [
                [one.size, one.closed, one.step, [[trial, score] for trial, score in one.live.items()]]
                for one in self._brackets
            ]
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._brackets, self._homes = [], {}
        for number, (size, closed, step, live) in enumerate(state["brackets"]):
            bracket = self._make_bracket(number)
            bracket.size, bracket.closed, bracket.step, bracket.live = size, closed, step, dict(live)
            self._brackets.append(bracket)
            self._homes.update(dict.fromkeys(bracket.live, number))

    def _make_bracket(self, number: int) -> _Bracket:
        halvings = self._halvings - number % (self._halvings + 1)
        capacity = math.ceil((self._halvings + 1) / (halvings + 1) * self._factor**halvings - 1e-9)
        milestones = [self._max_t / self._factor**left for left in range(halvings, 0, -1)]
        return _Bracket(capacity, milestones)

    def _is_complete(self, bracket: _Bracket) -> bool:
        return bracket.closed and bool(bracket.live) and None not in bracket.live.values()

    def _halve(self, bracket: _Bracket) -> set[str]:
        """Keep the best, who are on their way to the next milestone; return the others."""
        bracket.step += 1
        keep = max(1, math.floor(bracket.size / self._factor**bracket.step + 1e-9))
        scores = {trial_id: score for trial_id, score in bracket.live.items() if score is not None}
        ranked = sorted(scores, key=lambda trial_id: scores[trial_id], reverse=True)
        bracket.live = dict.fromkeys(ranked[:keep])
        return set(ranked[keep:])

    def _apply(self, tune_controller: TuneController, bracket: _Bracket, trial: Trial, worse: set[str]) -> None:
        if trial.trial_id in worse:
            tune_controller.stop_trial(trial)
        elif trial.trial_id in bracket.live:
            tune_controller.unpause_trial(trial)

    def _leave(self, tune_controller: TuneController, trial: Trial) -> None:
        number = self._homes.pop(trial.trial_id, None)
        if number is not None and trial.trial_id in self._brackets[number].live:
            del self._brackets[number].live[trial.trial_id]
            self._advance(tune_controller, self._brackets[number])

    def _advance(self, tune_controller: TuneController, bracket: _Bracket) -> None:
        """Go on without the trial that all have waited for."""
        if self._is_complete(bracket):
            worse = self._halve(bracket)
            for trial in tune_controller.get_live_trials():
                self._apply(tune_controller, bracket, trial, worse)

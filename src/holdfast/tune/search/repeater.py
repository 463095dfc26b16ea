"""`Repeater`: each suggestion of a searcher is tried several times, and the searcher learns the mean."""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.metrics import find_metric
from holdfast.errors import ConfigError
from holdfast.tune.objective import number
from holdfast.tune.search.searcher import Searcher
from holdfast.tune.search.wrapper import SearcherWrapper

__all__ = ["TRIAL_INDEX", "Repeater"]

TRIAL_INDEX = "__trial_index__"
"""The key of a configuration that tells the repeats of a suggestion apart, from 0."""


class Repeater(SearcherWrapper):
    """Give `TuneConfig(num_samples)` a multiple of `repeat`. Of a group of repeats the searcher knows the first trial
    only; when all have ended, it is told the mean of those that have a result."""

    needs_metric = True

    def __init__(self, searcher: Searcher, repeat: int = 1, set_index: bool = True) -> None:
        super().__init__(searcher)
        if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
            raise ConfigError(f"Repeater(repeat) must be 1 or more, not {repeat!r}.")
        self.repeat = repeat
        self._set_index = set_index
        self._config: dict[str, Any] = {}
        self._group = ""
        """The first trial of the suggestion that is being repeated."""
        self._started = 0
        """How many of the group's trials there are."""
        self._groups: dict[str, str] = {}
        """Of each trial that has not ended: the first of its group."""
        self._scores: dict[str, list[float | None]] = {}
        """By group: what its trials that have ended reported."""

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if not 0 < self._started < self.repeat:
            suggestion = self.searcher.suggest(trial_id)
            if not isinstance(suggestion, dict):
                return suggestion
            self._config = suggestion
            self._started = 0
        config = {**self._config, TRIAL_INDEX: self._started} if self._set_index else dict(self._config)
        self._add(trial_id)
        return config

    def replay_suggestion(self, trial_id: str, config: dict[str, Any]) -> None:
        if not 0 < self._started < self.repeat:
            self._config = {key: value for key, value in config.items() if key != TRIAL_INDEX}
            self.searcher.replay_suggestion(trial_id, self._config)
            self._started = 0
        self._add(trial_id)

    def _add(self, trial_id: str) -> None:
        if self._started == 0:
            self._group = trial_id
            self._scores[trial_id] = []
        self._started += 1
        self._groups[trial_id] = self._group

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """The searcher hears of whole groups only."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        group = self._groups.pop(trial_id, None)
        if group is None:
            return
        value = find_metric(result, self.metric) if result and not error else None
        scores = self._scores[group]
        scores.append(None if value is None else number(value, self.metric))
        if len(scores) < self.repeat:
            return
        del self._scores[group]
        known = [score for score in scores if score is not None and not math.isnan(score)]
        if known:
            self.searcher.on_trial_complete(group, {self.metric: sum(known) / len(known)})
        else:
            self.searcher.on_trial_complete(group, None, error=True)

    def get_state(self) -> dict[str, Any]:
        return {
            "searcher": self.searcher.get_state(),
            "config": self._config,
            "group": self._group,
            "started": self._started,
            "groups": dict(self._groups),
            "scores": {group: list(scores) for group, scores in self._scores.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.searcher.set_state(state["searcher"])
        self._config, self._group, self._started = state["config"], state["group"], state["started"]
        self._groups = dict(state["groups"])
        self._scores = {group: list(scores) for group, scores in state["scores"].items()}

"""`ConcurrencyLimiter`: no more than so many suggestions of a searcher are out at once.

Searchers that learn from results suggest better the more results they have seen.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.search.searcher import Searcher
from holdfast.tune.search.wrapper import SearcherWrapper

__all__ = ["ConcurrencyLimiter"]


class ConcurrencyLimiter(SearcherWrapper):
    """With `batch`, the searcher is told of results, and asked again, only when all trials that are out have ended."""

    def __init__(self, searcher: Searcher, max_concurrent: int, batch: bool = False) -> None:
        super().__init__(searcher)
        if isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int) or max_concurrent < 1:
            raise ConfigError(f"ConcurrencyLimiter(max_concurrent) must be 1 or more, not {max_concurrent!r}.")
        self.max_concurrent = max_concurrent
        self.batch = batch
        self._live: dict[str, list[Any] | None] = {}
        """Suggestions that are out. In a batch, trials that have ended stay here, with what their end was."""

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        self.max_concurrent = max_concurrent
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if len(self._live) >= self.max_concurrent:
            return None
        suggestion = self.searcher.suggest(trial_id)
        if isinstance(suggestion, dict):
            self._live[trial_id] = None
        return suggestion

    def replay_suggestion(self, trial_id: str, config: dict[str, Any]) -> None:
        self.searcher.replay_suggestion(trial_id, config)
        self._live[trial_id] = None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if trial_id not in self._live:
            return
        self._live[trial_id] = [result, error]
        if self.batch and not all(self._live.values()):
            return
        ended = [(one, end) for one, end in self._live.items() if end is not None]
        for one, (its_result, its_error) in ended:
            del self._live[one]
            self.searcher.on_trial_complete(one, its_result, error=its_error)

    def get_state(self) -> dict[str, Any]:
        return {"searcher": self.searcher.get_state(), "live": dict(self._live)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.searcher.set_state(state["searcher"])
        self._live = dict(state["live"])

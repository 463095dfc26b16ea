"""`SearcherWrapper`: a searcher around another, which it passes everything on to. `ConcurrencyLimiter` and `Repeater`
change a part of that."""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.search.searcher import Searcher

__all__ = ["SearcherWrapper"]


class SearcherWrapper(Searcher):
    def __init__(self, searcher: Searcher) -> None:
        if not isinstance(searcher, Searcher):
            raise ConfigError(f"{type(self).__name__}(searcher) must be a Searcher, not {searcher!r}.")
        self.searcher = searcher

    @property
    def metric(self) -> Any:
        return self.searcher.metric

    @property
    def mode(self) -> Any:
        return self.searcher.mode

    @property
    def accepts_grid_search(self) -> bool:  # type: ignore[override]
        return self.searcher.accepts_grid_search

    @property
    def needs_metric(self) -> bool:  # type: ignore[override]
        return self.searcher.needs_metric

    @property
    def is_quick(self) -> bool:  # type: ignore[override]
        return self.searcher.is_quick

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        return self.searcher.set_search_properties(metric, mode, config, **spec)

    def total_trials(self, num_samples: int) -> int | None:
        return self.searcher.total_trials(num_samples)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.searcher.on_trial_result(trial_id, result)

    def on_pause(self, trial_id: str) -> None:
        self.searcher.on_pause(trial_id)

    def on_unpause(self, trial_id: str) -> None:
        self.searcher.on_unpause(trial_id)

    def add_evaluated_point(
        self,
        parameters: dict[str, Any],
        value: float,
        error: bool = False,
        pruned: bool = False,
        intermediate_values: list[float] | None = None,
    ) -> None:
        self.searcher.add_evaluated_point(parameters, value, error, pruned, intermediate_values)

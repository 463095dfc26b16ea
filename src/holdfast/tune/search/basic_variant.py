"""`BasicVariantGenerator`: random and grid search, the default.

`num_samples` times the whole grid; values are drawn anew for each. The configuration of a trial depends on the seed and
on its number alone, so it needs no state but that number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.search.random_state import as_seed, seeded
from holdfast.tune.search.searcher import Searcher
from holdfast.tune.search.variant_generator import Space

__all__ = ["BasicVariantGenerator"]


class BasicVariantGenerator(Searcher):
    """`points_to_evaluate` come first, each in place of one sample; what a point leaves out is searched as usual.

    With `constant_grid_search` the values that are drawn for one sample are the same over its whole grid. With
    `max_concurrent`, no more trials than that run at once. `random_state` is a seed or a generator.
    """

    accepts_grid_search = True
    is_quick = True

    def __init__(
        self,
        points_to_evaluate: list[dict[str, Any]] | None = None,
        max_concurrent: int = 0,
        constant_grid_search: bool = False,
        random_state: Any = None,
    ) -> None:
        super().__init__()
        points = points_to_evaluate if points_to_evaluate is not None else []
        if not isinstance(points, Sequence) or not all(isinstance(point, Mapping) for point in points):
            raise ConfigError(f"BasicVariantGenerator(points_to_evaluate) must be a list of dicts, not {points!r}.")
        if isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int) or max_concurrent < 0:
            raise ConfigError(f"BasicVariantGenerator(max_concurrent) must be 0 or more, not {max_concurrent!r}.")
        self._points = list(points)
        self._constant_grid = bool(constant_grid_search)
        self._own_seed = as_seed("BasicVariantGenerator(random_state)", random_state)
        if self._own_seed is not None:
            self._constructed_with = (
                (),
                {
                    "points_to_evaluate": self._points,
                    "max_concurrent": max_concurrent,
                    "constant_grid_search": constant_grid_search,
                    "random_state": self._own_seed,
                },
            )
        self._max_concurrent = max_concurrent
        self._space = Space({})
        self._presets: list[dict[tuple[Any, ...], Any]] = []
        self._num_samples = 1
        self._next = 0
        self._live: dict[str, None] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        super().set_search_properties(metric, mode, {}, **spec)
        if self._own_seed is not None:
            self.seed = self._own_seed
        self._space = Space(config)
        self._presets = [self._space.preset(point) for point in self._points]
        self._num_samples = spec.get("num_samples", self._num_samples)
        return True

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        self._max_concurrent = max_concurrent
        return True

    @property
    def total_samples(self) -> int | None:
        """How many trials there will be; None if there is no end."""
        return self.total_trials(self._num_samples)

    def total_trials(self, num_samples: int) -> int | None:
        if num_samples < 0:
            return None
        presets = self._presets[:num_samples]
        whole = self._space.grid_size({})
        return sum(map(self._space.grid_size, presets)) + (num_samples - len(presets)) * whole

    def configuration(self, number: int) -> dict[str, Any]:
        """Of the trial of this number, from 0."""
        sample, in_grid, preset = self._locate(number)
        rng = seeded(self.seed, sample if self._constant_grid else number)
        return self._space.resolve(rng, in_grid, preset)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        total = self.total_samples
        if total is not None and self._next >= total:
            return Searcher.FINISHED
        if self._max_concurrent and len(self._live) >= self._max_concurrent:
            return None
        config = self.configuration(self._next)
        self.replay_suggestion(trial_id, config)
        return config

    def replay_suggestion(self, trial_id: str, config: dict[str, Any]) -> None:
        self._next += 1
        self._live[trial_id] = None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._live.pop(trial_id, None)

    def get_state(self) -> dict[str, Any]:
        return {"next": self._next, "live": list(self._live)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next, self._live = state["next"], dict.fromkeys(state["live"])

    def _locate(self, number: int) -> tuple[int, int, Mapping[tuple[Any, ...], Any]]:
        """Which sample, which place in its grid, and what is preset."""
        for sample, preset in enumerate(self._presets):
            size = self._space.grid_size(preset)
            if number < size:
                return sample, number, preset
            number -= size
        sample, in_grid = divmod(number, self._space.grid_size({}))
        return len(self._presets) + sample, in_grid, {}

"""`Searcher`: proposes configurations. Subclass it with `suggest`, and `on_trial_complete` to learn from results.

One call at a time, but from any thread: `suggest` may be slow, so the experiment asks in a thread, and goes on
meanwhile; what happens then the searcher is told before it is asked again. Each suggestion is in the journal before its
trial starts. After a restart the searcher is constructed again from its name and arguments, and what happened is
repeated to it in the same order: `replay_suggestion` for each suggestion, `on_trial_result` and `on_trial_complete` as
at first. A searcher that draws from a generator seeded with `self.seed` therefore goes on as if nothing had happened,
without saving anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.objective import check_metric, check_mode
from holdfast.tune.search.variant_generator import Space
from holdfast.tune.serialization import Stateful

__all__ = ["Searcher", "configure_searcher"]


class Searcher(Stateful):
    """`metric` and `mode` may be lists where several objectives are optimised at once."""

    FINISHED = "FINISHED"
    """What `suggest` returns when there is nothing left to try."""

    accepts_grid_search = False
    """Whether a space with `grid_search` can be given to `set_search_properties`."""

    needs_metric = False
    """Whether it can suggest nothing without a metric and a mode."""

    is_quick = False
    """No call takes long enough to need a thread."""

    seed: int = 0
    """The experiment's, unless the searcher was given one."""

    def __init__(self, metric: str | Sequence[str] | None = None, mode: str | Sequence[str] | None = None) -> None:
        name = type(self).__name__
        several = isinstance(metric, list | tuple)
        metrics, modes = (metric, mode) if several else ([metric], [mode])
        if several and (not isinstance(mode, list | tuple) or len(mode) != len(metric or ())):
            raise ConfigError(f"{name}(mode) must be a list with a mode for each of {metric!r}, not {mode!r}.")
        for one in metrics or ():
            check_metric(f"{name}(metric)", one, optional=not several)
        for one in modes or ():
            check_mode(f"{name}(mode)", one, optional=not several)
        self._metric = list(metric) if several else metric  # type: ignore[arg-type]
        self._mode = list(mode) if several else mode  # type: ignore[arg-type]

    @property
    def metric(self) -> Any:
        return self._metric

    @property
    def mode(self) -> Any:
        return self._mode

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Take over what the experiment says: its metric, mode and space, and `num_samples` and `seed` in `spec`.

        False if the searcher has its own, so that these would be ignored. The base takes metric and mode, and leaves
        the space to subclasses.
        """
        if metric:
            if self._metric:
                return False
            self._metric = metric
        if mode:
            if self._mode:
                return False
            self._mode = mode
        self.seed = spec.get("seed", self.seed)
        return Space(config).is_constant

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """A configuration for a new trial; None if there is none now, `FINISHED` if there will be none."""
        raise NotImplementedError

    def replay_suggestion(self, trial_id: str, config: dict[str, Any]) -> None:
        """This was suggested before the experiment was interrupted. Suggest again, and use what was recorded."""
        self.suggest(trial_id)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """A trial has reported."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """A trial has ended; `result` is its last, None if it never reported or failed."""

    def on_pause(self, trial_id: str) -> None:
        """A trial was paused by the scheduler."""

    def on_unpause(self, trial_id: str) -> None:
        """A paused trial goes on."""

    def total_trials(self, num_samples: int) -> int | None:
        """How many trials `TuneConfig(num_samples)` stands for; None if there is no end."""
        return None if num_samples < 0 else num_samples

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Limit how many suggestions are out at once; False if the searcher leaves that to `ConcurrencyLimiter`."""
        return False

    def add_evaluated_point(
        self,
        parameters: dict[str, Any],
        value: float,
        error: bool = False,
        pruned: bool = False,
        intermediate_values: list[float] | None = None,
    ) -> None:
        """Tell the searcher of a configuration that was evaluated elsewhere."""
        raise NotImplementedError(f"{type(self).__name__} cannot be told of configurations that it did not suggest.")


def configure_searcher(
    searcher: Searcher,
    metric: str | None,
    mode: str | None,
    space: Mapping[str, Any],
    *,
    num_samples: int,
    seed: int,
) -> dict[str, Any]:
    """Give a searcher what the experiment says, or raise one sentence; the constants to put under its suggestions."""
    name = type(searcher).__name__
    parts = Space(space)
    if parts.grids and not searcher.accepts_grid_search:
        raise ConfigError(
            f"param_space has a grid_search, which {name} cannot search: use tune.choice there, or leave out "
            "search_alg."
        )
    for what, given, own in (("metric", metric, searcher.metric), ("mode", mode, searcher.mode)):
        if given and own and given != own:
            raise ConfigError(f"TuneConfig({what}={given!r}) and {name}({what}={own!r}) differ: give one of them.")
        if searcher.needs_metric and not given and not own:
            raise ConfigError(f"{name} learns from results and needs a {what}: set TuneConfig({what}=...).")
    taken = searcher.set_search_properties(
        None if searcher.metric else metric,
        None if searcher.mode else mode,
        dict(space),
        num_samples=num_samples,
        seed=seed,
    )
    if not taken and not parts.is_constant:
        raise ConfigError(
            f"{name} has a search space of its own, so nothing would draw the values in param_space: give the space "
            "in one place."
        )
    return parts.constants()

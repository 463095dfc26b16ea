"""`OptunaSearch`: Optuna as a sampler, without its storage: the experiment's journal is the only memory.

Any sampler will do: TPE (the default), CMA-ES, GP, QMC, NSGA-II and the others. Each suggestion is asked of a fresh
copy of the sampler, whose generators are seeded with the searcher's seed and the number of the suggestion: so a sampler
that is made again, and told the same, suggests the same. Where it depends on nothing but the parameters and values of
trials (TPE, GP, random), a replayed suggestion is only entered; otherwise it is asked for again. The cost of TPE and GP
grows with the number of trials, so they see the best and the newest of them only.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.core.metrics import find_metric
from holdfast.errors import ConfigError, MissingExtra
from holdfast.tune.objective import number
from holdfast.tune.search.optuna.distributions import is_invertible, parameter_of, suggest_value
from holdfast.tune.search.random_state import seeded
from holdfast.tune.search.sample import Domain
from holdfast.tune.search.searcher import Searcher
from holdfast.tune.search.variant_generator import Path, Space, spell_path

if TYPE_CHECKING:
    import optuna

__all__ = ["OptunaSearch"]

_SEEDS = 2**31 - 1


class OptunaSearch(Searcher):
    """`space` may be left out (the experiment's is used), a dict of Optuna's distributions, or a function that asks an
    Optuna trial for parameters and may return constants. For several objectives `metric` and `mode` are lists.

    `points_to_evaluate` come first; with `evaluated_rewards` they are not run. `seed` is the experiment's by default,
    and counts with a given `sampler` too. `study_name` and `storage` have no effect.
    """

    history_limit = 1_000
    """How many ended trials TPE and GP see; at most twice as many before the older ones are left out."""

    def __init__(
        self,
        space: Mapping[str, Any] | Callable[[optuna.Trial], dict[str, Any] | None] | None = None,
        metric: str | Sequence[str] | None = None,
        mode: str | Sequence[str] | None = None,
        points_to_evaluate: list[dict[str, Any]] | None = None,
        sampler: optuna.samplers.BaseSampler | None = None,
        study_name: str | None = None,
        storage: Any = None,
        seed: int | None = None,
        evaluated_rewards: list[Any] | None = None,
    ) -> None:
        super().__init__(metric, mode)
        optuna = _import_optuna()
        if sampler is not None and not isinstance(sampler, optuna.samplers.BaseSampler):
            raise ConfigError(
                f"OptunaSearch(sampler) must be one of optuna.samplers, such as optuna.samplers.CmaEsSampler(), "
                f"not {sampler!r}."
            )
        points = points_to_evaluate or []
        if not isinstance(points, Sequence) or not all(isinstance(point, Mapping) for point in points):
            raise ConfigError(f"OptunaSearch(points_to_evaluate) must be a list of dicts, not {points!r}.")
        if evaluated_rewards is not None and len(evaluated_rewards) != len(points):
            raise ConfigError(
                f"OptunaSearch(evaluated_rewards) must have an entry for each of the {len(points)} points_to_evaluate, "
                f"not {len(evaluated_rewards)}."
            )
        if storage is not None:
            from holdfast.train.checks import warn_of_no_effect

            warn_of_no_effect("OptunaSearch(storage)", "the experiment's journal keeps the trials.", stacklevel=3)
        self._points, self._rewards = list(points), evaluated_rewards
        self._own_seed = seed
        self._sampler: Any = sampler or optuna.samplers.TPESampler()
        self._function: Callable[[Any], dict[str, Any] | None] | None = None
        self._distributions: dict[str, Any] = {}
        self._space: Space | None = None
        if isinstance(space, Mapping):
            if any(isinstance(one, Domain) for one in space.values()):
                self._space = Space(space)
            else:
                self._distributions = _checked_distributions(optuna, space)
        elif callable(space):
            self._function = space
        elif space is not None:
            raise ConfigError(
                f"OptunaSearch(space) must be a dict of optuna.distributions or a function of a trial, not {space!r}."
            )
        self._has_own_space = space is not None
        self._study: Any = None
        self._asked = 0
        self._numbers: dict[str, int] = {}
        """Of trials that have not ended: their number in the study."""
        self._finished = 0
        """How many of the study's trials have ended."""
        self._events: list[list[Any]] = []
        """Whatever happened, in order: the state."""

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        if not super().set_search_properties(metric, mode, {}, **spec):
            return False
        if self._own_seed is not None:
            self.seed = self._own_seed
        space = Space(config)
        if self._has_own_space:
            return space.is_constant
        if space.grids:
            names = ", ".join(map(spell_path, space.grids))
            raise ConfigError(
                f"OptunaSearch cannot search a grid_search, which param_space has at {names}: use choice."
            )
        self._space = space
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        config = self._ask(trial_id)
        self._events.append(["suggest", trial_id, config])
        return config

    def replay_suggestion(self, trial_id: str, config: dict[str, Any]) -> None:
        if self._depends_on_trials_alone():
            self._enter(trial_id, config)
        else:
            self._ask(trial_id)
        self._events.append(["suggest", trial_id, config])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if trial_id not in self._numbers:
            return
        values = None if error or not result else self._values(result)
        self._tell(trial_id, values)
        self._events.append(["complete", trial_id, values])

    def add_evaluated_point(
        self,
        parameters: dict[str, Any],
        value: float,
        error: bool = False,
        pruned: bool = False,
        intermediate_values: list[float] | None = None,
    ) -> None:
        trial_id = f"evaluated_{len(self._events)}"
        self.replay_suggestion(trial_id, parameters)
        self._tell(trial_id, None if error else [float(value)])
        self._events.append(["complete", trial_id, None if error else [float(value)]])

    def get_state(self) -> dict[str, Any]:
        return {"events": [list(event) for event in self._events]}

    def set_state(self, state: dict[str, Any]) -> None:
        for kind, trial_id, what in state["events"]:
            if kind == "suggest":
                self.replay_suggestion(trial_id, what)
            else:
                self._tell(trial_id, what)
                self._events.append([kind, trial_id, what])

    # ------------------------------------------------------------ asking

    def _ask(self, trial_id: str, sampler: optuna.samplers.BaseSampler | None = None) -> dict[str, Any]:
        study = self._opened_study()
        study.sampler = sampler or self._seeded_sampler()
        trial = study.ask(fixed_distributions=self._distributions or None)
        self._asked += 1
        self._numbers[trial_id] = trial.number
        if self._function is not None:
            constants = self._function(trial) or {}
            return {**trial.params, **constants}
        if self._space is None:
            return dict(trial.params)
        found: dict[Path, Any] = {
            path: suggest_value(trial, spell_path(path), domain) for path, domain in self._space.domains.items()
        }
        return self._space.resolve(seeded(self.seed, "functions", self._asked), preset=found)

    def _enter(self, trial_id: str, config: dict[str, Any]) -> None:
        """Ask for exactly this configuration: the sampler is not called."""
        self._opened_study().enqueue_trial(self._parameters_of(config))
        self._ask(trial_id, _import_optuna().samplers.RandomSampler(seed=0))

    def _parameters_of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration as Optuna's parameters. It may have more than the space has."""
        if self._space is None:
            return dict(config)
        return {
            spell_path(path): parameter_of(domain, functools.reduce(operator.getitem, path, config))
            for path, domain in self._space.domains.items()
        }

    def _preset_parameters(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A point of the user's, which may be a part of a configuration, as Optuna's parameters."""
        if self._space is None:
            return dict(config)
        preset = self._space.preset(config)
        found = {}
        for path, domain in self._space.domains.items():
            if path in preset:
                if not domain.is_valid(preset[path]):
                    raise ConfigError(
                        f"points_to_evaluate: {spell_path(path)}={preset[path]!r} is outside of {domain!r}."
                    )
                found[spell_path(path)] = parameter_of(domain, preset[path])
        return found

    def _depends_on_trials_alone(self) -> bool:
        samplers = _import_optuna().samplers
        if type(self._sampler) not in (samplers.TPESampler, samplers.RandomSampler, samplers.GPSampler):
            return False
        return self._space is None or all(map(is_invertible, self._space.domains.values()))

    # ------------------------------------------------------------ telling

    def _values(self, result: Mapping[str, Any]) -> list[float] | None:
        """One for each objective; None if one is missing or not a number."""
        metrics = self.metric if isinstance(self.metric, list) else [self.metric]
        found = [find_metric(result, metric) for metric in metrics]
        if any(value is None for value in found):
            return None
        values = [number(value, metric) for value, metric in zip(found, metrics, strict=True)]
        return None if any(map(math.isnan, values)) else values

    def _tell(self, trial_id: str, values: list[float] | None) -> None:
        trial_number = self._numbers.pop(trial_id)
        if values is None:
            self._study.tell(trial_number, state=_import_optuna().trial.TrialState.FAIL)
        else:
            self._study.tell(trial_number, values)
        self._finished += 1
        samplers = _import_optuna().samplers
        if self._finished >= 2 * self.history_limit and isinstance(
            self._sampler, samplers.TPESampler | samplers.GPSampler
        ):
            self._leave_out_old_trials()

    # ------------------------------------------------------------ the study

    def _opened_study(self) -> Any:
        if self._study is None:
            if not self.metric or not self.mode:
                raise ConfigError("OptunaSearch needs a metric and a mode: set TuneConfig(metric=..., mode=...).")
            if not (self._space or self._distributions or self._function):
                raise ConfigError("OptunaSearch has nothing to search: give Tuner(param_space=...) or its own space.")
            self._study = self._make_study()
            self._add_points()
        return self._study

    def _make_study(self) -> Any:
        optuna = _import_optuna()
        modes = self.mode if isinstance(self.mode, list) else [self.mode]
        with _quiet(optuna):
            return optuna.create_study(
                storage=optuna.storages.InMemoryStorage(),
                sampler=self._sampler,
                directions=["minimize" if mode == "min" else "maximize" for mode in modes],
            )

    def _add_points(self) -> None:
        if self._rewards is None:
            for point in self._points:
                self._study.enqueue_trial(self._preset_parameters(point))
            return
        for at, (point, reward) in enumerate(zip(self._points, self._rewards, strict=True)):
            self._study.enqueue_trial(self._preset_parameters(point))
            self._ask(f"evaluated_point_{at}", _import_optuna().samplers.RandomSampler(seed=0))
            self._asked -= 1  # it is no suggestion
            self._tell(f"evaluated_point_{at}", list(reward) if isinstance(reward, list | tuple) else [float(reward)])

    def _leave_out_old_trials(self) -> None:
        """Go on in a new study with the best and the newest trials, and those that have not ended."""
        states = _import_optuna().trial.TrialState
        trials = self._study.get_trials(deepcopy=False)
        ended = [trial for trial in trials if trial.state.is_finished()]
        complete = [trial for trial in ended if trial.state == states.COMPLETE]
        half = self.history_limit // 2
        kept = {trial.number for trial in ended[-half:]}
        if not isinstance(self.mode, list):
            best = sorted(complete, key=lambda trial: trial.value, reverse=self.mode == "max")
            kept.update(trial.number for trial in best[:half])
        names = {trial_number: trial_id for trial_id, trial_number in self._numbers.items()}
        self._study = self._make_study()
        self._finished, self._numbers = 0, {}
        for at, trial in enumerate(one for one in trials if one.number in kept or not one.state.is_finished()):
            self._study.add_trial(trial)
            self._finished += trial.state.is_finished()
            if trial.number in names:
                self._numbers[names[trial.number]] = at

    def _seeded_sampler(self) -> Any:
        """A copy of the sampler; each of its generators, and of samplers within it, has a seed for this suggestion."""
        from numpy.random import RandomState

        rng = seeded(self.seed, "ask", self._asked)
        constant = seeded(self.seed, "sampler").randrange(_SEEDS)
        sampler = copy.deepcopy(self._sampler)
        waiting, seen = [sampler], set()
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            for name, value in sorted(vars(one).items()):
                if isinstance(getattr(value, "rng", None), RandomState):
                    value.rng.seed(rng.randrange(_SEEDS))
                elif name == "_seed":  # a sequence's, such as QMC's: it stays the same
                    setattr(one, name, constant)
                elif type(value).__module__.startswith("optuna.samplers") and hasattr(value, "__dict__"):
                    waiting.append(value)
        return sampler


def _import_optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError:
        raise MissingExtra("OptunaSearch needs optuna; run: pip install 'holdfast[optuna]'") from None
    return optuna


def _checked_distributions(optuna: Any, space: Mapping[str, Any]) -> dict[str, Any]:
    for name, one in space.items():
        if not isinstance(one, optuna.distributions.BaseDistribution):
            raise ConfigError(
                f"OptunaSearch(space)[{name!r}] must be one of optuna.distributions, not {one!r}; constants belong "
                "into Tuner(param_space=...)."
            )
    return dict(space)


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Without Optuna's line about a new study."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)

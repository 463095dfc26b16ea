"""`OptunaSearch`: Optuna as a sampler, without its storage: the experiment's journal is the only memory.

Any sampler will do: TPE (the default), CMA-ES, GP, QMC, NSGA-II and the others. Each suggestion is asked of a fresh
copy of the sampler, whose generators are seeded with the searcher's seed and the number of the suggestion: so a sampler
that is made again, and told the same, suggests the same. Where it depends on nothing but the parameters and values of
trials (TPE, GP, random), a replayed suggestion is only noted; otherwise it is asked for again. The cost of TPE and GP
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

import msgspec

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


class _Evaluation(msgspec.Struct):
    """Parameters as Optuna names them, and what came of them: no values is a failure."""

    parameters: dict[str, Any]
    has_ended: bool = False
    values: list[float] | None = None


class OptunaSearch(Searcher):
    """`space` may be left out (the experiment's is used), a dict of Optuna's distributions, or a function that asks an
    Optuna trial for parameters and may return constants. For several objectives `metric` and `mode` are lists.

    `points_to_evaluate` come first; with `evaluated_rewards` they are not run. `seed` is the experiment's by default,
    and counts with a given `sampler` too. `study_name` and `storage` have no effect.
    """

    needs_metric = True
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
        """How many suggestions there were."""
        self._history: dict[str, _Evaluation] = {}
        """What the sampler may see, by trial, in order. The study is made of it."""
        self._numbers: dict[str, int] = {}
        """Of trials that have not ended: their number in the study."""
        self._finished = 0
        """How many in the history have ended."""
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
            self._history[trial_id] = _Evaluation(self._parameters_of(config))
            self._asked += 1
            self._study = None  # made again when it is needed
        else:
            self._ask(trial_id)
        self._events.append(["suggest", trial_id, config])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        known = self._history.get(trial_id)
        if known is None or known.has_ended:
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
        values = None if error else [float(value)]
        self._add_evaluated(parameters, values)
        self._events.append(["evaluated", parameters, values])

    def get_state(self) -> dict[str, Any]:
        return {"events": [list(event) for event in self._events]}

    def set_state(self, state: dict[str, Any]) -> None:
        for kind, what, values in state["events"]:
            if kind == "suggest":
                self.replay_suggestion(what, values)
                continue
            if kind == "complete":
                self._tell(what, values)
            else:
                self._add_evaluated(what, values)
            self._events.append([kind, what, values])

    # ------------------------------------------------------------ asking

    def _ask(self, trial_id: str) -> dict[str, Any]:
        study = self._opened_study()
        study.sampler = self._seeded_sampler()
        trial = study.ask(fixed_distributions=self._distributions or None)
        self._asked += 1
        self._numbers[trial_id] = trial.number
        config = self._suggest_all(trial)
        self._history[trial_id] = _Evaluation(dict(trial.params))
        return config

    def _suggest_all(self, trial: Any) -> dict[str, Any]:
        """Ask an Optuna trial for every parameter; the configuration."""
        if self._function is not None:
            constants = self._function(trial) or {}
            return {**trial.params, **constants}
        if self._space is None:
            for name, distribution in self._distributions.items():
                trial._suggest(name, distribution)
            return dict(trial.params)
        found: dict[Path, Any] = {
            path: suggest_value(trial, spell_path(path), domain) for path, domain in self._space.domains.items()
        }
        return self._space.resolve(seeded(self.seed, "functions", self._asked), preset=found)

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
        evaluation = self._history[trial_id]
        evaluation.has_ended, evaluation.values = True, values
        if self._study is not None:
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

    def _add_evaluated(self, parameters: Mapping[str, Any], values: list[float] | None) -> None:
        """A configuration that nobody suggested."""
        evaluation = _Evaluation(self._preset_parameters(parameters), True, values)
        if self._study is not None:
            self._study.add_trial(self._frozen(evaluation))
        self._history[f"evaluated {len(self._history)}"] = evaluation
        self._finished += 1

    def _leave_out_old_trials(self) -> None:
        """Go on with the best and the newest evaluations, and those that have not ended."""
        half = self.history_limit // 2
        ended = [trial_id for trial_id, one in self._history.items() if one.has_ended]
        kept = set(ended[-half:])
        if not isinstance(self.mode, list):
            values = {name: one.values[0] for name in ended if (one := self._history[name]).values is not None}
            kept.update(sorted(values, key=lambda name: values[name], reverse=self.mode == "max")[:half])
        self._history = {name: one for name, one in self._history.items() if name in kept or not one.has_ended}
        self._finished = len(kept)
        self._study = None

    # ------------------------------------------------------------ the study

    def _opened_study(self) -> Any:
        """Optuna's study, made from the history where there is none."""
        if self._study is not None:
            return self._study
        if not self.metric or not self.mode:
            raise ConfigError("OptunaSearch needs a metric and a mode: set TuneConfig(metric=..., mode=...).")
        if not (self._space or self._distributions or self._function):
            raise ConfigError("OptunaSearch has nothing to search: give Tuner(param_space=...) or its own space.")
        optuna = _import_optuna()
        modes = self.mode if isinstance(self.mode, list) else [self.mode]
        with _quiet(optuna):
            study = optuna.create_study(
                storage=optuna.storages.InMemoryStorage(),
                directions=["minimize" if mode == "min" else "maximize" for mode in modes],
            )
        self._numbers = {}
        evaluated = self._evaluated_points()
        for at, (trial_id, evaluation) in enumerate((evaluated | self._history).items()):
            study.add_trial(self._frozen(evaluation))
            if not evaluation.has_ended:
                self._numbers[trial_id] = at
        if self._rewards is None:
            for point in self._points[self._asked :]:
                study.enqueue_trial(self._preset_parameters(point))
        self._study = study
        return study

    def _evaluated_points(self) -> dict[str, _Evaluation]:
        """Points that were given with their values."""
        if self._rewards is None:
            return {}
        values = [list(one) if isinstance(one, list | tuple) else [float(one)] for one in self._rewards]
        return {
            f"point {at}": _Evaluation(self._preset_parameters(point), True, values[at])
            for at, point in enumerate(self._points)
        }

    def _frozen(self, evaluation: _Evaluation) -> Any:
        """As one of Optuna's trials."""
        optuna = _import_optuna()
        states = optuna.trial.TrialState
        fixed = optuna.trial.FixedTrial(evaluation.parameters)
        try:
            self._suggest_all(fixed)
        except ValueError as error:
            raise ConfigError(f"OptunaSearch cannot take {evaluation.parameters!r} as evaluated: {error}.") from error
        ended = states.FAIL if evaluation.values is None else states.COMPLETE
        return optuna.trial.create_trial(
            state=ended if evaluation.has_ended else states.RUNNING,
            values=evaluation.values,
            params=fixed.params,
            distributions=fixed.distributions,
        )

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

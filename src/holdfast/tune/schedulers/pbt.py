"""`PopulationBasedTraining`: the worst trials go on from the best ones' checkpoints, with changed hyperparameters.

After Jaderberg et al., Population Based Training of Neural Networks (2017). Each trial is judged when it has run for
`perturbation_interval` since it was judged last. Unless it becomes a copy, its newest checkpoint is pinned then, before
anybody wants it, and unpinned when a newer one takes its place: a donor's checkpoint cannot have been removed.
Random choices are seeded with the number of the choice, so they are the same when they are repeated.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from holdfast.errors import ConfigError
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.schedulers.trial_scheduler import ComparingScheduler, TrialScheduler, TuneController
from holdfast.tune.search.random_state import seeded
from holdfast.tune.search.sample import Categorical, Domain, Function

__all__ = ["PopulationBasedTraining", "explore"]

_log = logging.getLogger(__name__)


class _Member(msgspec.Struct):
    """One trial of the population."""

    judged_at: float = 0.0
    time: float = 0.0
    """Of its last result, to share slots fairly."""
    score: float | None = None
    """When it was judged last; None also from when it became a copy until it is judged again."""
    checkpoint: str | None = None
    """What others may go on from; pinned."""
    waits: bool = False
    """Whether it is paused until all others have come as far (`synch`)."""


class PopulationBasedTraining(ComparingScheduler):
    """Every `perturbation_interval` (of `time_attr`), and not before `burn_in_period`, a trial in the worst
    `quantile_fraction` takes over checkpoint and configuration of one in the best, changed by `explore`.

    `hyperparam_mutations` maps each hyperparameter to a list or a domain, a function that draws a value, or a dict of
    those; where a trial's configuration lacks one, it is drawn. `custom_explore_fn(config)` is called last. With
    `synch` all trials are judged together. If there are more trials than can run at once, they take turns. Trials must
    report checkpoints.
    """

    waits_for_checkpoints = True
    takes_turns = True

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        perturbation_interval: float = 60.0,
        burn_in_period: float = 0.0,
        hyperparam_mutations: dict[str, Any] | None = None,
        quantile_fraction: float = 0.25,
        resample_probability: float = 0.25,
        perturbation_factors: tuple[float, float] = (1.2, 0.8),
        custom_explore_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        log_config: bool = True,
        require_attrs: bool = True,
        synch: bool = False,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        mutations = hyperparam_mutations or {}
        if not mutations and custom_explore_fn is None:
            raise ConfigError(
                "PopulationBasedTraining needs hyperparam_mutations or custom_explore_fn: otherwise nothing changes."
            )
        _check_mutations("PopulationBasedTraining(hyperparam_mutations)", mutations)
        if not perturbation_interval > 0:
            raise ConfigError(
                f"PopulationBasedTraining(perturbation_interval) must be above 0, not {perturbation_interval!r}."
            )
        if not 0 <= quantile_fraction <= 0.5:
            raise ConfigError(
                f"PopulationBasedTraining(quantile_fraction) must be from 0 to 0.5, not {quantile_fraction!r}."
            )
        if not 0 <= resample_probability <= 1:
            raise ConfigError(
                f"PopulationBasedTraining(resample_probability) must be from 0 to 1, not {resample_probability!r}."
            )
        self._interval, self._burn_in = perturbation_interval, burn_in_period
        self._mutations, self._fraction = mutations, quantile_fraction
        self._resample, self._factors = resample_probability, tuple(perturbation_factors)
        self._custom = custom_explore_fn
        self._require_attrs, self._synch = require_attrs, synch
        self._members: dict[str, _Member] = {}
        self._added = 0
        self._explored = 0

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        self._members[trial.trial_id] = _Member()
        _fill_in(trial.config, self._mutations, seeded(self.seed, "initial", self._added))
        self._added += 1

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]) -> str:
        measured = self.time_and_score(result)
        if measured is None:
            if self._require_attrs:
                raise ConfigError(
                    f"Trial {trial.trial_id} must report {self._time_attr!r} and {self.metric!r} each time, for "
                    "PopulationBasedTraining; set require_attrs=False to skip results that lack them."
                )
            return TrialScheduler.CONTINUE
        member = self._members[trial.trial_id]
        member.time, score = measured
        if member.time < self._burn_in or member.time - member.judged_at < self._interval:
            return TrialScheduler.CONTINUE
        member.judged_at, member.score = member.time, score
        if self._synch:
            self._pin_newest(tune_controller, trial, member)
            member.waits = True
            if not all(one.waits for one in self._members.values()):
                return TrialScheduler.PAUSE
            return self._judge_all(tune_controller, trial)
        worst, best = self._quantiles()
        if trial.trial_id in worst and self._exploit(tune_controller, trial, best):
            return TrialScheduler.NOOP
        self._pin_newest(tune_controller, trial, member)
        return TrialScheduler.PAUSE if _somebody_waits(tune_controller, trial) else TrialScheduler.CONTINUE

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        """The one that has run for the shortest time."""
        found = [
            trial
            for trial in tune_controller.get_live_trials()
            if trial.status in (Trial.PENDING, Trial.PAUSED) and not self._members[trial.trial_id].waits
        ]
        return min(found, key=lambda trial: self._members[trial.trial_id].time, default=None)

    def on_idle(self, tune_controller: TuneController) -> None:
        """All that can come have come."""
        self._judge_all(tune_controller, None)

    def debug_string(self) -> str:
        return f"PopulationBasedTraining: {self._explored} perturbations"

    def get_state(self) -> dict[str, Any]:
        return {
            "members": {trial_id: msgspec.structs.asdict(member) for trial_id, member in self._members.items()},
            "added": self._added,
            "explored": self._explored,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._members = {trial_id: _Member(**fields) for trial_id, fields in state["members"].items()}
        self._added, self._explored = state["added"], state["explored"]

    # ------------------------------------------------------------ exploit

    def _quantiles(self) -> tuple[list[str], list[str]]:
        """The worst and the best of those that were judged."""
        scores = {trial_id: one.score for trial_id, one in self._members.items() if one.score is not None}
        ranked = sorted(scores, key=lambda trial_id: scores[trial_id])
        if len(ranked) < 2:
            return [], []
        count = min(math.ceil(len(ranked) * self._fraction), len(ranked) // 2)
        return (ranked[:count], ranked[-count:]) if count else ([], [])

    def _exploit(self, tune_controller: TuneController, trial: Trial, best: list[str]) -> bool:
        """Have the trial go on as a changed copy of one of the best; False if none of those has a checkpoint."""
        donors = [one for one in tune_controller.get_live_trials() if one.trial_id in best]
        donors = [one for one in donors if self._members[one.trial_id].checkpoint is not None]
        if not donors:
            _log.warning(
                "Trial %s is among the worst, but none of the best trials has reported a checkpoint that it could go "
                "on from: report one every perturbation_interval.",
                trial.trial_id,
            )
            return False
        rng = seeded(self.seed, "explore", self._explored)
        self._explored += 1
        donor = rng.choice(donors)
        model = self._members[donor.trial_id]
        config = explore(donor.config, self._mutations, self._resample, self._factors, self._custom, rng)
        member = self._members[trial.trial_id]
        self._unpin(tune_controller, trial, member)
        member.score, member.judged_at, member.time = None, model.judged_at, model.judged_at
        assert model.checkpoint is not None
        tune_controller.exploit_trial(trial, donor, model.checkpoint, config)
        return True

    def _judge_all(self, tune_controller: TuneController, reporting: Trial | None) -> str:
        """All wait: the worst become copies of the best, and all go on. What becomes of the one that has reported."""
        worst, best = self._quantiles()
        decision = TrialScheduler.CONTINUE
        for trial in tune_controller.get_live_trials():
            member = self._members.get(trial.trial_id)
            if member is None or not member.waits:
                continue  # it is ending, or on its way
            member.waits = False
            if trial.trial_id in worst and self._exploit(tune_controller, trial, best):
                decision = TrialScheduler.NOOP if trial is reporting else decision
            elif trial is not reporting:
                tune_controller.unpause_trial(trial)
        return decision

    def _pin_newest(self, tune_controller: TuneController, trial: Trial, member: _Member) -> None:
        if trial.checkpoint is None or trial.checkpoint == member.checkpoint:
            return
        tune_controller.pin_checkpoint(trial, trial.checkpoint)
        self._unpin(tune_controller, trial, member)
        member.checkpoint = trial.checkpoint

    def _unpin(self, tune_controller: TuneController, trial: Trial, member: _Member) -> None:
        if member.checkpoint is not None:
            tune_controller.unpin_checkpoint(trial, member.checkpoint)
            member.checkpoint = None

    def _leave(self, tune_controller: TuneController, trial: Trial) -> None:
        member = self._members.pop(trial.trial_id, None)
        if member is None:
            return
        self._unpin(tune_controller, trial, member)
        if self._synch and self._members and all(one.waits for one in self._members.values()):
            self._judge_all(tune_controller, None)


# ------------------------------------------------------------------ explore


def explore(
    config: Mapping[str, Any],
    mutations: Mapping[str, Any],
    resample_probability: float,
    perturbation_factors: tuple[float, ...],
    custom_explore_fn: Callable[[dict[str, Any]], dict[str, Any]] | None,
    rng: random.Random,
) -> dict[str, Any]:
    """A changed copy of the configuration.

    Each hyperparameter is drawn anew with `resample_probability`. Otherwise a number is multiplied by one of the
    factors, within the bounds of its domain, and one of a list or a choice gives way to its neighbour.
    """
    changed = copy.deepcopy(dict(config))
    _mutate(changed, mutations, resample_probability, perturbation_factors, rng)
    if custom_explore_fn is not None:
        changed = custom_explore_fn(changed)
        if not isinstance(changed, dict):
            raise ConfigError(f"PopulationBasedTraining(custom_explore_fn) must return a dict, not {changed!r}.")
    return changed


def _mutate(
    config: dict[str, Any],
    mutations: Mapping[str, Any],
    resample: float,
    factors: tuple[float, ...],
    rng: random.Random,
) -> None:
    for key, mutation in mutations.items():
        if isinstance(mutation, Mapping):
            _mutate(config[key], mutation, resample, factors, rng)
            continue
        old = config.get(key)
        values = _values(mutation)
        if rng.random() < resample or old is None or (values is not None and old not in values):
            config[key] = _draw(mutation, rng)
        elif values is not None:
            at = values.index(old) + rng.choice((-1, 1))
            config[key] = values[min(max(at, 0), len(values) - 1)]
        else:
            new = old * rng.choice(factors)
            new = mutation.cast(new) if isinstance(mutation, Domain) else new
            config[key] = int(new) if isinstance(old, int) else new


def _values(mutation: Any) -> list[Any] | None:
    """The values in order, where there are only so many."""
    if isinstance(mutation, Categorical):
        return list(mutation.categories)
    return list(mutation) if isinstance(mutation, list | tuple) else None


def _draw(mutation: Any, rng: random.Random) -> Any:
    if isinstance(mutation, Domain):
        return mutation.draw(rng)
    values = _values(mutation)
    return mutation() if values is None else rng.choice(values)


def _fill_in(config: dict[str, Any], mutations: Mapping[str, Any], rng: random.Random) -> None:
    """Draw what the configuration lacks."""
    for key, mutation in mutations.items():
        if isinstance(mutation, Mapping):
            _fill_in(config.setdefault(key, {}), mutation, rng)
        elif key not in config:
            config[key] = _draw(mutation, rng)


def _check_mutations(what: str, mutations: Any) -> None:
    if not isinstance(mutations, Mapping):
        raise ConfigError(f"{what} must be a dict, not {mutations!r}.")
    for key, mutation in mutations.items():
        if isinstance(mutation, Mapping):
            _check_mutations(f"{what}[{key!r}]", mutation)
        elif isinstance(mutation, Function):
            raise ConfigError(f"{what}[{key!r}]: sample_from cannot be drawn alone; give the function itself.")
        elif isinstance(mutation, list | tuple):
            if not mutation:
                raise ConfigError(f"{what}[{key!r}] is an empty list: give it at least one value.")
        elif not isinstance(mutation, Domain) and not callable(mutation):
            raise ConfigError(
                f"{what}[{key!r}] must be a list, a domain such as tune.uniform, or a function, not {mutation!r}."
            )


def _somebody_waits(tune_controller: TuneController, trial: Trial) -> bool:
    return any(
        one is not trial and one.status in (Trial.PENDING, Trial.PAUSED) for one in tune_controller.get_live_trials()
    )

"""Schedulers in whole experiments: small examples with decisions by hand, and promises that hold for any of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tune.simulated_experiment import Experiment, restart_by_replay, restart_from_state

from holdfast import tune
from holdfast.errors import ConfigError
from holdfast.tune.experiment import Trial
from holdfast.tune.schedulers import (
    ASHAScheduler,
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
    create_scheduler,
)
from holdfast.tune.schedulers.pbt import explore
from holdfast.tune.schedulers.trial_scheduler import configure_scheduler
from holdfast.tune.search.random_state import seeded
from holdfast.tune.serialization import from_json, to_json

CONTINUE, PAUSE, STOP, NOOP = "CONTINUE", "PAUSE", "STOP", "NOOP"
ITERATION = "training_iteration"
X = {"x": tune.uniform(0, 1)}
MUTATIONS = {"x": tune.uniform(0, 1), "kind": ["a", "b", "c"]}


def improving(config: dict[str, Any], state: Any) -> tuple[float, dict[str, Any]]:
    """Better with each step, and the better the larger x is."""
    total = (state or 0.0) + config["x"]
    return total, {"score": total}


def noisy(config: dict[str, Any], state: Any) -> tuple[int, dict[str, Any]]:
    """Any score, and now and then none."""
    step = (state or 0) + 1
    rng = seeded(str(config["x"]), step)
    score = rng.choice([math.nan, math.inf, -math.inf, rng.random(), rng.random(), rng.random()])
    return step, {"score": score}


def make(name: str) -> Any:
    if name == "asha":
        return ASHAScheduler(max_t=9, reduction_factor=3)
    if name == "asha brackets":
        return ASHAScheduler(max_t=16, reduction_factor=2, brackets=3, stop_last_trials=False)
    if name == "hyperband":
        return HyperBandScheduler(max_t=9, reduction_factor=3)
    if name == "hyperband goes on":
        return HyperBandScheduler(max_t=4, reduction_factor=2, stop_last_trials=False)
    if name == "median":
        return MedianStoppingRule(ITERATION, grace_period=2, min_samples_required=2)
    if name == "median pauses":
        return MedianStoppingRule(ITERATION, grace_period=1, min_time_slice=1, hard_stop=False)
    if name == "pbt":
        return PopulationBasedTraining(ITERATION, perturbation_interval=2, hyperparam_mutations=MUTATIONS)
    if name == "pbt synch":
        return PopulationBasedTraining(
            ITERATION, perturbation_interval=3, hyperparam_mutations=MUTATIONS, quantile_fraction=0.5, synch=True
        )
    assert name == "fifo"
    return FIFOScheduler()


NAMES = [
    "asha",
    "asha brackets",
    "fifo",
    "hyperband",
    "hyperband goes on",
    "median",
    "median pauses",
    "pbt",
    "pbt synch",
]


# ------------------------------------------------------------------ promises of all


@pytest.mark.parametrize("name", NAMES)
@given(
    seed=st.integers(0, 2**32), slots=st.integers(1, 5), trials=st.integers(1, 12), failures=st.sampled_from([0, 0.1])
)
@settings(max_examples=25)
def test_every_trial_ends_and_nothing_is_left_pinned(
    name: str, seed: int, slots: int, trials: int, failures: float
) -> None:
    """No barrier waits for ever, whatever fails and however few slots there are."""
    done = Experiment(
        noisy, X, make(name), num_samples=trials, slots=slots, seed=seed, failures=failures, max_steps=12
    ).run()
    assert len(done.trials) == trials
    assert all(trial.is_finished() for trial in done.trials)
    assert not done.pinned


@pytest.mark.parametrize("restart", [restart_from_state, restart_by_replay])
@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), slots=st.integers(1, 4), failures=st.sampled_from([0, 0.1]))
@settings(max_examples=5)
def test_a_scheduler_that_is_made_again_at_any_time_decides_the_same(
    name: str, restart: Any, seed: int, slots: int, failures: float
) -> None:
    def run(restarts: Any) -> list[tuple[Any, ...]]:
        rng = seeded("restart", seed)
        experiment = Experiment(noisy, X, make(name), num_samples=7, slots=slots, seed=seed, failures=failures)
        if restarts is not None:
            experiment.restart = lambda one: restarts(one) if rng.random() < 0.2 else None
        return experiment.run().decisions

    assert run(restart) == run(None)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_without_the_metric_decides_nothing(name: str) -> None:
    scheduler: TrialScheduler = make(name)
    if isinstance(scheduler, PopulationBasedTraining):
        scheduler = PopulationBasedTraining(ITERATION, hyperparam_mutations=MUTATIONS, require_attrs=False)
    done = Experiment(lambda config, state: (None, {"other": 1}), X, scheduler, num_samples=3, max_steps=5).run()
    assert done.steps == 15


# ------------------------------------------------------------------ by hand


class Told(Experiment):
    """Trials report when the test says so."""

    def __init__(self, scheduler: TrialScheduler, trials: int, slots: int = 9) -> None:
        super().__init__(improving, {"x": 1}, scheduler, num_samples=trials, slots=slots, max_steps=1_000)
        self.start_trials()

    def report(self, number: int, score: float, iteration: int) -> Any:
        trial = self.trials[number]
        assert trial.status == Trial.RUNNING
        self.commit(trial, score, iteration)
        trial.last_result = {"score": score, ITERATION: iteration}
        decision = self.tell("on_trial_result", trial, trial.last_result)
        if decision == STOP:
            self.end(trial, Trial.TERMINATED, "on_trial_complete", trial.last_result)
        elif decision == PAUSE:
            trial.status = Trial.PAUSED
        return decision

    def statuses(self) -> list[str]:
        return [trial.status for trial in self.trials]


def test_asha_lets_the_best_quarter_so_far_pass_a_milestone() -> None:
    told = Told(ASHAScheduler(max_t=16, grace_period=1, reduction_factor=4), 6)
    assert told.report(0, 10, 1) == CONTINUE, "the first has nobody to be compared with"
    assert told.report(1, 9, 1) == STOP, "below 10"
    assert told.report(2, 9.75, 1) == CONTINUE, "three quarters of the way from 9 to 10"
    assert told.report(3, 9.8, 1) == STOP, "below 9.875"
    assert told.report(0, 5, 3) == CONTINUE, "no milestone"
    assert told.report(0, 5, 4) == CONTINUE, "the first at 4"
    assert told.report(2, 4.9, 6) == STOP, "a milestone is reached at or beyond it"
    assert told.report(4, math.nan, 1) == STOP, "not a number ranks worst"
    assert told.report(0, 99, 16) == STOP, "max_t"


def test_asha_counts_a_trial_once_that_goes_back_to_a_checkpoint() -> None:
    scheduler = ASHAScheduler(max_t=100, reduction_factor=2)
    told = Told(scheduler, 2)
    told.report(0, 10, 1)
    before = scheduler.get_state()
    assert told.report(0, 0, 1) == CONTINUE
    assert scheduler.get_state() == before


def test_asha_has_milestones_by_bracket() -> None:
    scheduler = ASHAScheduler(max_t=64, grace_period=1, reduction_factor=4, brackets=2)
    assert scheduler._milestones == [[1, 4, 16, 64], [4, 16, 64]]
    told = Told(scheduler, 60, slots=60)
    brackets = [bracket for bracket, _ in scheduler._places.values()]
    assert 30 < brackets.count(0) < 60, "the bracket with more milestones gets more trials"
    assert told.report(0, 1, 64) == STOP


def test_hyperband_pauses_a_bracket_and_keeps_its_best() -> None:
    """max_t=4 and a factor of 2: brackets of 4, 3 and 3 trials, with 2, 1 and no milestones."""
    told = Told(HyperBandScheduler(max_t=4, reduction_factor=2), 10, slots=10)
    assert [told.report(number, score, 1) for number, score in ((0, 3), (1, 1), (2, 4))] == [PAUSE] * 3
    assert told.report(3, 2, 1) == STOP, "the last to come is among the worse half"
    assert told.statuses()[:4] == ["PENDING", "TERMINATED", "PENDING", "TERMINATED"]
    told.start_trials()
    assert told.report(0, 5, 2) == PAUSE
    assert told.report(2, 6, 3) == CONTINUE, "the best goes on without a pause"
    assert told.statuses()[:4] == ["TERMINATED", "TERMINATED", "RUNNING", "TERMINATED"]
    assert told.report(2, 7, 4) == STOP, "max_t"
    assert told.report(4, 1, 1) == CONTINUE, "the next bracket has its only milestone at 2"
    assert [told.report(4, 1, 2), told.report(5, 2, 2), told.report(6, 3, 2)] == [PAUSE, PAUSE, CONTINUE]
    assert told.report(7, 1, 3) == CONTINUE, "the last bracket has none"


def test_hyperband_does_not_wait_for_trials_that_failed_or_never_come() -> None:
    told = Told(HyperBandScheduler(max_t=4, reduction_factor=2), 4)
    assert [told.report(0, 1, 1), told.report(1, 2, 1), told.report(2, 3, 1)] == [PAUSE] * 3
    told.end(told.trials[3], Trial.ERROR, "on_trial_error")
    assert told.statuses() == ["TERMINATED", "PENDING", "PENDING", "ERROR"]

    short = Told(HyperBandScheduler(max_t=4, reduction_factor=2), 2)
    assert [short.report(0, 1, 1), short.report(1, 2, 1)] == [PAUSE] * 2
    short.tell("on_idle")
    assert short.statuses() == ["TERMINATED", "PENDING"]


def test_the_median_rule_compares_the_best_with_the_running_means_of_others() -> None:
    told = Told(MedianStoppingRule(ITERATION, grace_period=2, min_samples_required=2), 4)
    assert told.report(0, -99, 1) == CONTINUE, "within the grace period, and not in the mean"
    for iteration, score in ((2, 1.0), (3, 3.0)):
        assert told.report(0, score, iteration) == told.report(1, score + 2, iteration) == CONTINUE, "too few"
    # Running means up to 2: 1 and 3, up to 3: 2 and 4. The medians are 2 and 3.
    assert told.report(2, 2.0, 2) == CONTINUE
    assert told.report(3, 1.5, 2) == STOP
    assert told.report(2, 2.9, 3) == STOP, "the others' means at 3 are 2 and 4"


def test_the_median_rule_lets_those_it_paused_run_last() -> None:
    told = Told(MedianStoppingRule(ITERATION, grace_period=1, min_samples_required=2, hard_stop=False), 3)
    told.report(0, 5, 1)
    told.report(1, 5, 1)
    assert told.report(2, 1, 1) == PAUSE
    assert told.scheduler.choose_trial_to_run(told) is told.trials[2]
    told.start_trials()
    assert told.report(2, 0, 2) == CONTINUE, "it is not judged again"


def pbt(**arguments: Any) -> PopulationBasedTraining:
    given = {"perturbation_interval": 2, "hyperparam_mutations": {"x": [1, 2, 3, 4]}, **arguments}
    return PopulationBasedTraining(ITERATION, **given)


def test_pbt_makes_the_worst_a_changed_copy_of_the_best() -> None:
    told = Told(pbt(resample_probability=0), 4)
    assert [told.report(number, 0, 1) for number in range(4)] == [CONTINUE] * 4, "before the interval"
    assert [told.report(number, number, 2 + number) for number in range(4)] == [CONTINUE] * 4, "each is the best so far"
    assert told.report(0, 0.5, 4) == NOOP
    [exploited] = [one for one in told.decisions if one[0] == "exploit_trial"]
    assert exploited[1:3] == ("t000", "t003")
    assert exploited[4] in ({"x": 1}, {"x": 2}), "a neighbour of the best one's 1"
    assert told.trials[0].status == Trial.PENDING
    assert told.checkpoints["t000", told.trials[0].checkpoint or ""] == (3, 5), "state and iteration of the best"
    told.start_trials()
    assert told.report(0, 0, 6) == CONTINUE, "judged again an interval after the donor was"


def test_pbt_keeps_the_checkpoint_of_a_donor_from_retention() -> None:
    told = Told(pbt(), 4)
    told.report(3, 9, 2)
    pinned = told.trials[3].checkpoint
    told.report(3, 9, 3)
    assert told.trials[3].checkpoint != pinned and told.pinned == {("t003", pinned)}
    told.report(0, 1, 2)
    assert [one[3] for one in told.decisions if one[0] == "exploit_trial"] == [pinned]
    told.report(3, 9, 4)
    assert told.pinned == {("t003", told.trials[3].checkpoint)}
    told.end(told.trials[3], Trial.TERMINATED, "on_trial_complete", {})
    assert not told.pinned


def test_pbt_says_so_when_the_best_have_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    told = Told(pbt(), 2)
    for trial, score in zip(told.trials, (2, 1), strict=True):
        told.tell("on_trial_result", trial, {"score": score, ITERATION: 2})
    assert "none of the best trials has reported a checkpoint" in caplog.text


def test_pbt_draws_what_the_configuration_lacks() -> None:
    mutations = {"lr": tune.uniform(1, 2), "deep": {"kind": ["a"]}, "x": [5]}
    told = Told(pbt(hyperparam_mutations=mutations), 2)
    first, second = (trial.config for trial in told.trials)
    assert 1 <= first["lr"] <= 2 and first["lr"] != second["lr"]
    assert (first["deep"], first["x"]) == ({"kind": "a"}, 1), "what is there stays"


def test_synchronous_pbt_judges_all_together() -> None:
    told = Told(pbt(synch=True, quantile_fraction=0.5), 3)
    assert [told.report(number, 3 - number, 2) for number in (0, 2)] == [PAUSE, PAUSE]
    assert told.report(1, 2, 3) == CONTINUE
    assert [one[1:3] for one in told.decisions if one[0] == "exploit_trial"] == [("t002", "t000")]
    assert told.statuses() == ["PENDING", "RUNNING", "PENDING"]


def test_trials_of_pbt_take_turns() -> None:
    told = Told(pbt(), 2, slots=1)
    told.trials.append(Trial("t001", {"x": 1}))
    told.tell("on_trial_add", told.trials[1])
    assert told.report(0, 1, 2) == PAUSE
    assert told.scheduler.choose_trial_to_run(told) is told.trials[1]


@given(st.integers())
def test_explored_values_stay_within_their_domains(seed: int) -> None:
    mutations = {
        **{"f": tune.uniform(0.5, 1), "i": tune.randint(1, 4), "c": tune.choice("abc"), "l": [10, 20, 30]},
        **{"q": tune.quniform(0, 1, 0.25), "g": lambda: 7.0, "deep": {"f": tune.loguniform(1e-3, 1)}},
    }
    config: dict[str, Any] = {
        "f": 0.9,
        "i": 3,
        "c": "b",
        "l": 20,
        "q": 0.5,
        "g": 2.0,
        "deep": {"f": 0.9, "kept": 1},
        "kept": 2,
    }
    changed = explore(config, mutations, 0.25, (1.2, 0.8), None, seeded(seed))
    assert 0.5 <= changed["f"] <= 1 and changed["i"] in (1, 2, 3) and changed["c"] in "abc"
    assert type(changed["i"]) is int
    assert changed["l"] in (10, 20, 30) and changed["q"] in (0, 0.25, 0.5, 0.75, 1)
    assert changed["g"] in (7.0, 2.4, 1.6) and 1e-3 <= changed["deep"]["f"] <= 1
    assert changed["kept"] == 2 and changed["deep"]["kept"] == 1
    assert config["deep"]["f"] == 0.9, "the donor's own is not touched"


def test_a_custom_function_has_the_last_word() -> None:
    def double(config: dict[str, Any]) -> dict[str, Any]:
        return {"x": config["x"] * 2}

    assert explore({"x": 1}, {}, 0, (1.2, 0.8), double, seeded(0)) == {"x": 2}
    with pytest.raises(ConfigError, match=r"custom_explore_fn\) must return a dict, not None"):
        explore({}, {}, 0, (1.2, 0.8), lambda config: None, seeded(0))  # type: ignore[arg-type,return-value]


# ------------------------------------------------------------------ quality


def test_asha_saves_most_of_the_steps_and_finds_nearly_the_best() -> None:
    for seed in range(3):
        whole = Experiment(improving, X, num_samples=64, slots=4, max_steps=64, seed=seed).run()
        saving = Experiment(
            improving, X, ASHAScheduler(max_t=64), num_samples=64, slots=4, max_steps=64, seed=seed
        ).run()
        best = max(trial.last_result["score"] for trial in whole.trials)
        found = max(trial.last_result["score"] for trial in saving.trials)
        assert whole.steps == 64 * 64
        assert saving.steps < whole.steps / 4
        assert found > 0.9 * best


def decaying(config: dict[str, Any], state: Any) -> tuple[list[float], dict[str, Any]]:
    """The best learning rate falls as training goes on, so that no constant one is good."""
    step, score = state or (0, 0.0)
    best = 0.1 * 0.9**step
    score += math.exp(-(math.log(config["lr"] / best) ** 2))
    return [step + 1, score], {"score": score}


def test_pbt_beats_random_search_at_the_same_budget() -> None:
    space = {"lr": tune.loguniform(1e-4, 1)}
    ratios = []
    for seed in range(8):
        arguments: dict[str, Any] = {"num_samples": 12, "slots": 4, "max_steps": 40, "seed": seed}
        drawn = Experiment(decaying, space, **arguments).run()
        scheduler = PopulationBasedTraining(ITERATION, perturbation_interval=4, hyperparam_mutations=space)
        population = Experiment(decaying, space, scheduler, **arguments).run()
        assert population.steps <= drawn.steps, "a copy need not train what its donor has"
        best, best_drawn = (max(one.last_result["score"] for one in done.trials) for done in (population, drawn))
        ratios.append(best / best_drawn)
    assert min(ratios) > 1, ratios
    assert sum(ratios) / len(ratios) > 1.3, ratios


# ------------------------------------------------------------------ construction


@pytest.mark.parametrize("name", NAMES)
def test_a_scheduler_is_stored_by_name_and_arguments(name: str) -> None:
    scheduler = make(name)
    assert to_json(from_json(to_json(scheduler), "scheduler")) == to_json(scheduler)


def test_schedulers_are_made_by_name() -> None:
    assert isinstance(create_scheduler("ASHA", max_t=5), AsyncHyperBandScheduler)
    assert isinstance(create_scheduler("pbt", hyperparam_mutations={"x": [1]}), PopulationBasedTraining)


@pytest.mark.parametrize(
    ("make_one", "sentence"),
    [
        (lambda: ASHAScheduler(mode="least"), r'AsyncHyperBandScheduler\(mode\) must be "min" or "max"'),
        (lambda: ASHAScheduler(metric=""), r"\(metric\) must be a metric's name"),
        (lambda: ASHAScheduler(max_t=5, grace_period=6), r"grace_period\) must be above 0 and at most max_t=5"),
        (lambda: ASHAScheduler(reduction_factor=1), r"reduction_factor\) must be above 1"),
        (lambda: ASHAScheduler(brackets=0), r"brackets\) must be a whole number of 1 or more"),
        (lambda: HyperBandScheduler(max_t=0), r"HyperBandScheduler\(max_t\) must be above 0"),
        (lambda: MedianStoppingRule(min_samples_required=0), r"min_samples_required\) must be 1 or more"),
        (PopulationBasedTraining, r"needs hyperparam_mutations or custom_explore_fn"),
        (lambda: pbt(quantile_fraction=0.6), r"quantile_fraction\) must be from 0 to 0\.5"),
        (lambda: pbt(perturbation_interval=0), r"perturbation_interval\) must be above 0"),
        (lambda: pbt(resample_probability=2), r"resample_probability\) must be from 0 to 1"),
        (lambda: pbt(hyperparam_mutations={"a": {"b": []}}), r"\['a'\]\['b'\] is an empty list"),
        (lambda: pbt(hyperparam_mutations={"a": 3}), r"\['a'\] must be a list, a domain such as tune\.uniform"),
        (lambda: pbt(hyperparam_mutations={"a": tune.sample_from(max)}), r"\['a'\]: sample_from cannot be drawn alone"),
        (lambda: create_scheduler("bohb"), r"create_scheduler\(scheduler\) must be one of"),
        (lambda: configure_scheduler(ASHAScheduler(), None, "min", seed=0), r"needs a metric: set TuneConfig"),
        (lambda: configure_scheduler(ASHAScheduler(), "loss", None, seed=0), r"needs a mode: set TuneConfig"),
        (
            lambda: configure_scheduler(ASHAScheduler(metric="a"), "b", "min", seed=0),
            r"TuneConfig\(metric='b'\) and AsyncHyperBandScheduler\(metric='a'\) differ",
        ),
        (
            lambda: Told(pbt(), 1).tell("on_trial_result", Trial("t000"), {}),
            r"Trial t000 must report 'training_iteration' and 'score' each time",
        ),
    ],
)
def test_bad_schedulers_get_one_sentence(make_one: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_one()

"""Stoppers: what each stops and when, by example, and that one made again goes on where the other was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import ConfigError
from holdfast.runtime import Runtime, runtime_var
from holdfast.tune.serialization import from_json, to_json
from holdfast.tune.stopper import (
    CombinedStopper,
    DictStopper,
    ExperimentPlateauStopper,
    FunctionStopper,
    MaximumIterationStopper,
    NoopStopper,
    Stopper,
    TimeoutStopper,
    TrialPlateauStopper,
)
from holdfast.tune.stopper.resolve import make_stopper


def asked(stopper: Stopper, values: list[float], trial: str = "t") -> list[bool]:
    return [stopper(trial, {"loss": value, "training_iteration": at}) for at, value in enumerate(values, start=1)]


def at_most_half(trial_id: str, result: dict[str, Any]) -> bool:
    return bool(result["loss"] <= 0.5)


def test_a_dict_stops_a_trial_at_or_above_any_of_its_values() -> None:
    stopper = make_stopper({"acc": 0.9, "eval/steps": 3})
    assert not stopper("t", {"acc": 0.8, "eval": {"steps": 2}})
    assert stopper("t", {"acc": 0.9, "eval": {"steps": 2}})
    assert stopper("t", {"acc": 0.1, "eval": {"steps": 4}})
    assert not stopper.stop_all()
    with pytest.raises(ConfigError, match=r'names the metric "acc", which trial t has not reported.*: loss\.'):
        stopper("t", {"loss": 1})


def test_a_function_stops_a_trial() -> None:
    stopper = make_stopper(lambda trial_id, result: trial_id == "t" and result["loss"] < 1)
    assert isinstance(stopper, FunctionStopper)
    assert asked(stopper, [2, 0.5]) == [False, True]
    assert asked(stopper, [0.5], "other") == [False]


def test_whatever_users_write_becomes_one_stopper() -> None:
    given = NoopStopper()
    assert make_stopper(given) is given
    assert isinstance(make_stopper(None), NoopStopper)
    assert isinstance(make_stopper([{"loss": 1}, given, at_most_half]), CombinedStopper)
    for wrong in (3, "loss", lambda: True, Stopper):
        with pytest.raises(ConfigError, match=r"RunConfig\(stop\) must be a dict of metrics, a function"):
            make_stopper(wrong)


def test_iterations_are_counted_from_the_trials_beginning() -> None:
    stopper = MaximumIterationStopper(3)
    assert asked(stopper, [1, 1, 1, 1]) == [False, False, True, True]
    assert asked(stopper, [1, 1]) == [False, False], "a trial that went back to a checkpoint"


def test_a_trial_stops_when_its_last_values_are_close_to_each_other() -> None:
    assert asked(TrialPlateauStopper("loss"), [9, 1, 1, 1, 1]) == [False, False, False, False, True]
    assert asked(TrialPlateauStopper("loss", num_results=2, grace_period=4), [1, 1, 1, 1]) == [*[False] * 3, True]
    assert asked(TrialPlateauStopper("loss", std=1, num_results=2, grace_period=0), [1, 3, 6]) == [False, True, False]
    assert asked(TrialPlateauStopper("loss"), [float("nan")] * 5) == [False] * 5
    threshold = {"num_results": 2, "grace_period": 0, "metric_threshold": 0.5}
    assert asked(TrialPlateauStopper("loss", mode="min", **threshold), [1, 1, 0.1, 0.1]) == [*[False] * 3, True]  # type: ignore[arg-type]
    assert asked(TrialPlateauStopper("loss", mode="max", **threshold), [0.1, 0.1, 1, 1]) == [*[False] * 3, True]  # type: ignore[arg-type]


def test_trials_have_plateaus_of_their_own() -> None:
    stopper = TrialPlateauStopper("loss", num_results=2, grace_period=0)
    assert asked(stopper, [1]) == [False]
    assert asked(stopper, [5], "other") == [False]
    assert asked(stopper, [1]) == [True]


def test_the_experiment_stops_when_its_best_values_are_close_to_each_other() -> None:
    stopper = ExperimentPlateauStopper("loss", top=3, std=0.1)
    assert asked(stopper, [5, 1.0, 4, 1.1, 9]) == [False] * 5
    assert not stopper.stop_all()
    assert asked(stopper, [1.05]) == [True]
    assert stopper.stop_all() and stopper.has_plateaued()
    patient = ExperimentPlateauStopper("loss", top=2, std=0.1, mode="max", patience=2)
    assert asked(patient, [1, 1, 1, 1]) == [False, False, False, True]
    improving = ExperimentPlateauStopper("loss", top=2, std=0.1, mode="max", patience=1)
    assert asked(improving, [1, 1, 5, 5, 5]) == [*[False] * 4, True], "an improvement starts the count again"


class Clock(Runtime):
    seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    token = runtime_var.set(made)
    yield made
    runtime_var.reset(token)


@pytest.mark.parametrize("timeout", [60, timedelta(minutes=1)])
def test_time_is_counted_while_a_driver_runs(clock: Clock, timeout: Any) -> None:
    first = TimeoutStopper(timeout)
    assert not first.stop_all()
    clock.seconds += 59
    assert not first.stop_all() and not first("t", {})
    clock.seconds += 1
    assert first.stop_all()
    second = TimeoutStopper(timeout)
    second.set_state({"elapsed_s": 40.0})
    clock.seconds += 1_000
    assert not second.stop_all()
    clock.seconds += 20
    assert second.stop_all()


def test_any_of_several_stops_and_each_hears_of_every_result() -> None:
    plateau = TrialPlateauStopper("loss", num_results=2, grace_period=0)
    stopper = CombinedStopper(FunctionStopper(at_most_half), plateau)
    assert asked(stopper, [1, 0.4, 0.4]) == [False, True, True]
    assert plateau.get_state() == {"values": {"t": [0.4, 0.4]}}
    assert not stopper.stop_all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DictStopper({"loss": 3}),
        lambda: MaximumIterationStopper(3),
        lambda: TrialPlateauStopper("loss", num_results=3, grace_period=2),
        lambda: ExperimentPlateauStopper("loss", top=3, std=0.5, patience=1),
        lambda: CombinedStopper(TrialPlateauStopper("loss"), FunctionStopper(at_most_half), NoopStopper()),
        lambda: TimeoutStopper(timedelta(hours=1)),
    ],
)
def test_a_stopper_that_is_made_again_goes_on_where_the_other_was(make: Any) -> None:
    values = [5, 1, 1.1, 1.0, 1.05, 3.2, 1, 1, 1, 0.5]
    for cut in range(len(values)):
        first = make()
        before = asked(first, values[:cut])
        second = from_json(json.loads(json.dumps(to_json(first))), "stop")
        second.set_state(json.loads(json.dumps(first.get_state())))
        whole = make()
        assert before == asked(whole, values[:cut])
        assert asked(second, values[cut:]) == asked(whole, values[cut:])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: make_stopper({"loss": "low"}), r"must map metrics to numbers; 'loss': 'low' does not"),
        (lambda: MaximumIterationStopper(0), r"max_iter\) must be a whole number of 1 or more"),
        (lambda: TimeoutStopper(0), r"timeout\) must be a number of seconds above 0"),
        (lambda: TrialPlateauStopper(""), r"metric\) must be a metric's name"),
        (
            lambda: TrialPlateauStopper("loss", metric_threshold=1),
            r'which metric_threshold needs, must be "min" or "max"',
        ),
        (lambda: ExperimentPlateauStopper("loss", mode="least"), r'mode\) must be "min" or "max"'),
        (lambda: ExperimentPlateauStopper("loss", top=1), r"top\) must be a whole number of 2 or more"),
        (lambda: ExperimentPlateauStopper("loss", std=0), r"std\) must be a number above 0"),
        (lambda: ExperimentPlateauStopper("loss", patience=-1), r"patience\) must be a whole number of 0 or more"),
        (lambda: FunctionStopper(lambda: True), r"must be a function of trial_id and result"),  # type: ignore[arg-type,misc]
        (lambda: CombinedStopper({"loss": 1}), r"takes stoppers"),  # type: ignore[arg-type]
    ],
)
def test_bad_stoppers_get_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()

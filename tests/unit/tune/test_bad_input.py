"""What cannot work is refused in one sentence, before a trial starts and before anything is written to storage."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast import tune
from holdfast.errors import ConfigError
from holdfast.tune.objective import require_metric
from holdfast.tune.schedulers import ASHAScheduler
from holdfast.tune.search import ConcurrencyLimiter, Repeater, Searcher
from holdfast.tune.stopper import Stopper

LOCK = threading.Lock()


class Own(Searcher):
    """Cannot search grids."""

    def suggest(self, trial_id: str) -> dict[str, Any]:
        return {}


class Locked(Stopper):
    def __init__(self) -> None:
        self.lock = LOCK


def objective(config: dict[str, Any]) -> None:
    tune.report({"loss": 1})


BAD: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "scheduler without a mode": (
        *(objective, {}, {"metric": "loss", "scheduler": ASHAScheduler()}, {}),
        r"AsyncHyperBandScheduler compares trials and needs a mode: set TuneConfig\(mode=...\)",
    ),
    "searcher without a metric": (
        *(objective, {"x": tune.uniform(0, 1)}, {"mode": "min", "search_alg": Repeater(Own(), 2)}, {}),
        r"Repeater learns from results and needs a metric: set TuneConfig\(metric=...\)",
    ),
    "two metrics": (
        *(objective, {}, {"metric": "loss", "mode": "min", "scheduler": ASHAScheduler(metric="acc", mode="min")}, {}),
        r"TuneConfig\(metric='loss'\) and AsyncHyperBandScheduler\(metric='acc'\) differ",
    ),
    "grid": (
        *(objective, {"x": tune.grid_search([1, 2])}, {"search_alg": ConcurrencyLimiter(Own(), 2)}, {}),
        "param_space has a grid_search, which .* cannot search: use tune.choice",
    ),
    "stopper that cannot be copied": (
        *(objective, {}, {}, {"stop": Locked()}),
        r"RunConfig\(stop\) is copied at each call, and cannot be \(TypeError: cannot pickle .*lock",
    ),
    "function that cannot be sent": (
        *(lambda config, lock=LOCK: lock.acquire(), {}, {}, {}),
        "The trainable cannot be sent to the workers .*lock.*: open files, locks",
    ),
    "configuration that cannot be sent": (
        *(objective, {"x": tune.uniform(0, 1), "lock": LOCK}, {}, {}),
        "param_space cannot be sent to the workers",
    ),
    "CPUs": (
        *(tune.with_resources(objective, {"cpu": 5000}), {}, {}, {}),
        r"tune\.with_resources asks for 5000 CPU, but this machine has .*: ask for less",
    ),
    "GPUs": (
        *(tune.with_resources(objective, {"gpu": 5000}), {}, {}, {}),
        r"tune\.with_resources asks for 5000 GPU, but this machine has .*: ask for less",
    ),
    "checkpoints of a function": (
        *(objective, {}, {}, {"checkpoint_config": tune.CheckpointConfig(checkpoint_frequency=2)}),
        r"CheckpointConfig\(checkpoint_frequency\) is for classes derived from tune\.Trainable",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_an_experiment_that_cannot_work_is_refused(tmp_path: Path, what: str) -> None:
    trainable, space, config, run, match = BAD[what]
    run_config = tune.RunConfig(name="bad", storage_path=tmp_path / "storage", **run)
    tuner = tune.Tuner(trainable, param_space=space, tune_config=tune.TuneConfig(**config), run_config=run_config)
    with pytest.raises(ConfigError, match=match) as caught:
        tuner.fit()
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert not (tmp_path / "storage").exists()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (tune.Tuner, "must be a function of the configuration"),
        (lambda: tune.Tuner(lambda: None), "takes no argument, but is called with a trial's configuration"),
        (lambda: tune.Tuner(objective, param_space=[1]), r"Tuner\(param_space\) must be a dict"),  # type: ignore[arg-type]
        (lambda: tune.Tuner(dict), "dict is no subclass of tune.Trainable"),
        (lambda: tune.TuneConfig(mode="maximum"), r'TuneConfig\(mode\) must be "min" or "max"'),
        (lambda: tune.TuneConfig(num_samples=0), "would try nothing"),
        (lambda: tune.RunConfig(stop=3), r"RunConfig\(stop\) must be a dict"),
        (lambda: tune.with_resources(objective, {"cpu": -1}), r"tune\.with_resources\(resources\) must map names"),
        (lambda: tune.with_resources(objective, {"cpu": "2"}), r"tune\.with_resources\(resources\) must map names"),
        (lambda: tune.with_resources(objective, 2), "must be a dict such as"),
        (lambda: tune.with_parameters(objective, data=1), "has no parameter 'data'"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_where_it_is_written(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_a_metric_that_is_not_reported_is_named_with_those_that_are() -> None:
    require_metric("training_iteration", {}, "t")
    require_metric("a/b", {"a": {"b": 1}}, "t")
    with pytest.raises(ConfigError, match=r'Trial t reported no metric "acc".*TuneConfig\(metric=...\): a/b, loss\.'):
        require_metric("acc", {"loss": 1, "a": {"b": 2}}, "t")

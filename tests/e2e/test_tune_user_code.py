"""What users have written and give to an experiment may raise anything: the experiment ends in order with a sentence
that names it, no other run of the process minds, and the same call goes on once it is mended."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
from holdfast.errors import ConfigError
from holdfast.tune.schedulers import FIFOScheduler
from holdfast.tune.search import Searcher
from holdfast.tune.stopper import Stopper
from holdfast.tune.syncer import Syncer

pytestmark = pytest.mark.timeout(120)

RAISED: list[BaseException] = []
"""What hooks are to raise when they are called for a trial that is not the first; empty once that is mended."""


@pytest.fixture(autouse=True)
def mended_afterwards(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "holdfast"):
        yield
    RAISED.clear()


def misbehave(trial_id: str) -> None:
    if RAISED and not trial_id.endswith("00000"):
        raise RAISED[0]


class Results(Stopper):
    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        misbehave(trial_id)
        return False

    def stop_all(self) -> bool:
        return False


class All(Stopper):
    trial_id = "00000"

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.trial_id = trial_id
        return False

    def stop_all(self) -> bool:
        misbehave(self.trial_id)
        return False


class AtResult(FIFOScheduler):
    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        misbehave(trial.trial_id)
        return str(self.CONTINUE)


class AtEnd(FIFOScheduler):
    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        misbehave(trial.trial_id)


class AtAdd(FIFOScheduler):
    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        misbehave(trial.trial_id)


class AtChoice(FIFOScheduler):
    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        found = super().choose_trial_to_run(tune_controller)
        misbehave("00000" if found is None else found.trial_id)
        return found


class Quick(Searcher):
    is_quick = True

    def suggest(self, trial_id: str) -> dict[str, Any]:
        misbehave(trial_id)
        return {}


class Hook(tune.Callback):
    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        misbehave(trial.trial_id)


class Reporter(tune.ProgressReporter):
    def should_report(self, trials: list[Any], done: bool = False) -> bool:
        misbehave(trials[-1].trial_id)
        return False


def sample(config: Any) -> float:
    if RAISED:
        raise RAISED[0]
    return 1.0


def name_trial(trial: Any) -> str:
    misbehave(trial.trial_id)
    return str(trial)


def name_directory(trial: Any) -> str:
    misbehave(trial.trial_id)
    return f"of_{trial.trial_id}"


HOOKS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stopper": ({}, {"stop": Results()}, r"RunConfig\(stop\): Results\.__call__"),
    "stopper of all": ({}, {"stop": All()}, r"RunConfig\(stop\): All\.stop_all"),
    "scheduler, result": ({"scheduler": AtResult()}, {}, r"TuneConfig\(scheduler\): AtResult\.on_trial_result"),
    "scheduler, end": ({"scheduler": AtEnd()}, {}, r"TuneConfig\(scheduler\): AtEnd\.on_trial_complete"),
    "scheduler, new trial": ({"scheduler": AtAdd()}, {}, r"TuneConfig\(scheduler\): AtAdd\.on_trial_add"),
    "scheduler, choice": ({"scheduler": AtChoice()}, {}, r"TuneConfig\(scheduler\): AtChoice\.choose_trial_to_run"),
    "searcher": ({"search_alg": Quick()}, {}, r"TuneConfig\(search_alg\): Quick\.suggest"),
    "trial name": ({"trial_name_creator": name_trial}, {}, r"TuneConfig\(trial_name_creator\): name_trial"),
    "directory": (
        {"trial_dirname_creator": name_directory},
        {},
        r"TuneConfig\(trial_dirname_creator\): name_directory",
    ),
    "callback": ({}, {"callbacks": [Hook()]}, r"Hook\.on_trial_result"),
    "reporter": ({}, {"progress_reporter": Reporter()}, r"RunConfig\(progress_reporter\): Reporter"),
    "sample_from": ({}, {}, r"param_space\['x'\]: sample_from\(sample\)"),
}


def check_what_is_raised(sandbox: Sandbox, hook: str, error: BaseException) -> None:
    """Two trials run at once when the error comes; afterwards each of them has made its only report."""
    config, run, sentence = HOOKS[hook]

    def train(config: dict[str, Any]) -> None:
        tune.report({"loss": config.get("x", 1)})

    def fit() -> tune.ResultGrid:
        return tune.Tuner(
            train,
            param_space={"x": tune.sample_from(sample)} if hook == "sample_from" else {},
            tune_config=tune.TuneConfig(num_samples=3, max_concurrent_trials=2, **config),
            run_config=tune.RunConfig(name="tuning", storage_path=sandbox.storage, **run),
        ).fit()

    RAISED.append(error)
    expected = ConfigError if hook == "sample_from" else tune.TuneError
    with pytest.raises(expected, match=f"^{sentence} raised {type(error).__name__}") as caught:
        fit()
    assert "\n" not in str(caught.value)
    RAISED.clear()
    results = fit()
    assert results.num_terminated == len(results) == 3
    assert [one.metrics["loss"] for one in results if one.metrics] == [1] * 3


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exit_in_what_users_have_written_ends_their_experiment_alone(sandbox: Sandbox, hook: str) -> None:
    """While the trial of another one waits, which then goes on."""
    gate = sandbox.root / "gate"
    os.mkfifo(gate)

    def wait(config: dict[str, Any]) -> None:
        tune.report({"read": gate.read_text()})

    def fit() -> tune.ResultGrid:
        run = tune.RunConfig(name="other", storage_path=sandbox.storage)
        return tune.Tuner(wait, run_config=run).fit()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(fit)
        try:
            check_what_is_raised(sandbox, hook, SystemExit(3))
        finally:
            gate.write_text("go")
        (result,) = other.result(60)
    assert result.metrics is not None and result.metrics["read"] == "go"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StopIteration(1), GeneratorExit(), ValueError("no")], ids=repr)
@pytest.mark.parametrize("hook", ["stopper", "scheduler, choice", "callback", "sample_from"])
def test_whatever_is_raised_is_told_in_one_sentence(sandbox: Sandbox, hook: str, error: BaseException) -> None:
    check_what_is_raised(sandbox, hook, error)


def test_an_exit_in_a_syncer_leaves_the_copy_incomplete_and_says_so(
    sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    class Exits(Syncer):
        def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
            raise SystemExit(3)

        def close(self) -> None:
            raise GeneratorExit

    config = tune.SyncConfig(syncer=Exits(), upload_dir=str(sandbox.root / "mirror"))
    run = tune.RunConfig(name="tuning", local_dir=sandbox.storage, sync_config=config)
    with caplog.at_level(logging.WARNING, "holdfast"):
        results = tune.Tuner(lambda config: {"loss": 1}, run_config=run).fit()
    assert results.num_terminated == 1
    assert re.search(r"The copy at .* is not complete, since Exits failed \(SystemExit: 3\); all of", caplog.text)


def test_two_trials_cannot_have_one_directory(sandbox: Sandbox) -> None:
    """They would mix their checkpoints."""

    def fit(directory: Any) -> tune.ResultGrid:
        return tune.Tuner(
            lambda config: {"loss": config["x"]},
            param_space={"x": tune.grid_search([1, 2])},
            tune_config=tune.TuneConfig(trial_dirname_creator=directory, max_concurrent_trials=1),
            run_config=tune.RunConfig(name="tuning", storage_path=sandbox.storage),
        ).fit()

    with pytest.raises(ConfigError, match=r"TuneConfig\(trial_dirname_creator\) gave 'same' for trial .*_00001, which"):
        fit(lambda trial: "same")
    results = fit(lambda trial: f"of_{trial.trial_id}")
    assert [one.metrics["loss"] for one in results if one.metrics] == [1, 2]
    assert Path(results[0].path).name == "same" and Path(results[1].path).name.startswith("of_")


def test_a_metric_of_stop_that_no_trial_reports_ends_the_experiment_and_not_a_trial(sandbox: Sandbox) -> None:
    """As in Ray. A trial that had failed of it could not be read back with the same `stop`."""

    def fit(stop: dict[str, float]) -> tune.ResultGrid:
        return tune.Tuner(
            lambda config: {"loss": config["x"]},
            param_space={"x": tune.grid_search([1, 2])},
            tune_config=tune.TuneConfig(max_concurrent_trials=1),
            run_config=tune.RunConfig(name="tuning", storage_path=sandbox.storage, stop=stop),
        ).fit()

    with pytest.raises(ConfigError, match=r'RunConfig\(stop\) names the metric "acc".*name one of these: .*loss'):
        fit({"acc": 1})
    results = fit({"loss": 5})
    assert [one.metrics["loss"] for one in results if one.metrics] == [1, 2] and not results.errors

"""What ends an experiment before its trials have ended: a time budget, a stopper, a failure, a signal. The same call,
or one with more time, goes on with the others, and nothing is done twice."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
from holdfast.errors import TrainingFailedError
from holdfast.train.interrupted import Interrupted
from holdfast.tune.experiment_controller import ExperimentController
from holdfast.tune.machine import ExperimentMachine
from holdfast.tune.schedulers import AsyncHyperBandScheduler
from holdfast.tune.stopper import TimeoutStopper
from holdfast.tune.trial_setup import TrialSetup

_STEPS = 3


def climb(config: dict[str, Any]) -> None:
    """Three steps, each noted in a file; at the second, wait for whoever opens the pipe, if there is one."""
    step = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            step = int(Path(directory, "step").read_text())
    while step < _STEPS:
        step += 1
        with Path(config["calls"]).open("a") as file:
            file.write(f"{config['x']}:{step}\n")
        if step == 2 and Path(config["wait"]).exists():
            with Path(config["here"]).open("w") as here:
                here.write("here")
            Path(config["wait"]).read_text()
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            tune.report({"step": step}, checkpoint=tune.Checkpoint.from_directory(directory))
        if config["x"] == 0 and step == 1 and not Path(config["mend"]).exists():
            raise ValueError("not today")


class Experiment:
    """Three trials, one at a time unless it is said otherwise."""

    def __init__(self, sandbox: Sandbox, first: int = 1) -> None:
        self.calls = sandbox.root / "calls"
        self.here, self.wait, self.mend = (sandbox.root / name for name in ("here", "wait", "mend"))
        self.storage = sandbox.storage
        self.space = {
            **{name: str(getattr(self, name)) for name in ("calls", "here", "wait", "mend")},
            "x": tune.grid_search([first, first + 1, first + 2]),
        }

    def hold(self) -> None:
        """Trials wait at their second steps."""
        os.mkfifo(self.here)
        os.mkfifo(self.wait)

    def let_go(self) -> None:
        self.wait.unlink()

    def tuner(self, run: dict[str, Any] | None = None, **config: Any) -> tune.Tuner:
        return tune.Tuner(
            climb,
            param_space=self.space,
            tune_config=tune.TuneConfig(**{"max_concurrent_trials": 1, **config}),
            run_config=tune.RunConfig(name="tuning", storage_path=self.storage, **(run or {})),
        )

    def check(self, results: tune.ResultGrid, again: int) -> None:
        """All trials made all steps, and no more than so many of them twice."""
        assert [one.metrics["step"] for one in results if one.metrics] == [_STEPS] * 3
        calls = self.calls.read_text().split()
        assert len(set(calls)) == 3 * _STEPS and len(calls) <= 3 * _STEPS + again


def steps(results: tune.ResultGrid) -> list[int]:
    return [one.metrics["step"] if one.metrics else 0 for one in results]


@pytest.mark.parametrize("limit", ["time budget", "stopper"])
def test_an_experiment_ends_with_its_time_and_goes_on_with_more(sandbox: Sandbox, limit: str) -> None:
    """The time of all calls counts: the same one again does nothing."""
    experiment = Experiment(sandbox)
    experiment.hold()

    def tuner(seconds: float) -> tune.Tuner:
        if limit == "time budget":
            return experiment.tuner(time_budget_s=seconds)
        return experiment.tuner(run={"stop": TimeoutStopper(seconds)})

    results = tuner(0.5).fit()
    assert max(steps(results)) <= 1, "a trial went on that waits"
    experiment.let_go()
    assert results.num_terminated == 1
    again = tuner(0.5).fit()
    assert steps(again) == steps(results) and again.num_terminated == 1
    experiment.check(tuner(3600.0).fit(), again=1)


def test_the_first_failure_is_raised_and_the_same_call_goes_on_with_the_others(sandbox: Sandbox) -> None:
    experiment = Experiment(sandbox, first=0)
    run = {"failure_config": tune.FailureConfig(fail_fast="raise")}
    with pytest.raises(TrainingFailedError, match="not today"):
        experiment.tuner(run).fit()
    assert steps(experiment.tuner(run).get_results()) == [1]
    results = experiment.tuner(run).fit()
    assert (steps(results), results.num_errors) == ([1, 3, 3], 1)
    assert "not today" in str(results.errors[0])


def test_ctrl_c_ends_the_experiment_which_is_restored_later(sandbox: Sandbox) -> None:
    """In the middle of a trial, which goes on from its checkpoint."""
    experiment = Experiment(sandbox)
    experiment.hold()

    def interrupt() -> None:
        experiment.here.read_text()
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        with pytest.raises(Interrupted):
            experiment.tuner().fit()
        interrupting.result(60)
    assert steps(experiment.tuner().get_results()) == [1]
    experiment.let_go()
    experiment.check(tune.Tuner.restore(sandbox.storage / "tuning", climb).fit(), again=1)


def test_trials_that_the_failure_of_another_stopped_go_on_from_their_checkpoints(sandbox: Sandbox) -> None:
    """Two at a time: one waits at its second step while the other fails."""
    experiment = Experiment(sandbox, first=0)
    experiment.hold()
    run = {"failure_config": tune.FailureConfig(fail_fast=True)}
    results = experiment.tuner(run, max_concurrent_trials=2).fit()
    assert results.num_errors == 1 and max(steps(results)) == 1
    experiment.let_go()
    experiment.mend.touch()
    assert steps(experiment.tuner(run).fit()) == [1, 3, 3]
    experiment.check(tune.Tuner.restore(sandbox.storage / "tuning", climb, resume_errored=True).fit(), again=1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("why", ["failure", "callback"])
def test_a_trial_that_is_prepared_when_the_experiment_is_stopped_does_not_run(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Its scheduler knows by then that it has ended, and would not understand its reports."""
    stopped = threading.Event()
    prepare, give_up, stop = TrialSetup.__call__, ExperimentController._give_up, ExperimentMachine._stop
    called = sandbox.root / "called"

    def prepare_slowly(self: TrialSetup, trial: Any, *others: Any) -> Any:
        if trial.number == 1:
            assert stopped.wait(60)
        return prepare(self, trial, *others)

    def noted_give_up(self: ExperimentController, error: BaseException) -> None:
        give_up(self, error)
        stopped.set()

    def noted_stop(self: ExperimentMachine, *decision: Any) -> None:
        stop(self, *decision)
        stopped.set()

    class Hook(tune.Callback):
        def on_trial_result(self, *told: Any, **info: Any) -> None:
            if why == "callback" and not stopped.is_set():
                raise RuntimeError("not today")

    def train(config: dict[str, Any]) -> None:
        with called.open("a") as file:
            file.write(str(config["x"]))
        tune.report({"loss": config["x"]})
        if why == "failure" and config["x"] == 0:
            raise ValueError("not today")

    def fit() -> tune.ResultGrid:
        scheduler = AsyncHyperBandScheduler(metric="loss", mode="min")
        return tune.Tuner(
            train,
            param_space={"x": tune.grid_search([0, 1])},
            tune_config=tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=2),
            run_config=tune.RunConfig(
                name="tuning",
                storage_path=sandbox.storage,
                failure_config=tune.FailureConfig(fail_fast=why == "failure"),
                callbacks=[Hook()],
            ),
        ).fit()

    monkeypatch.setattr(TrialSetup, "__call__", prepare_slowly)
    monkeypatch.setattr(ExperimentController, "_give_up", noted_give_up)
    monkeypatch.setattr(ExperimentMachine, "_stop", noted_stop)
    if why == "callback":
        with pytest.raises(tune.TuneError, match="not today"):
            fit()
    else:
        assert fit().num_errors == 1
    assert called.read_text() == "0"
    results = fit()
    assert set(called.read_text()) == {"0", "1"}
    assert [one.metrics["loss"] for one in results if one.metrics] == [0, 1]

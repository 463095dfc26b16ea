"""Searchers in real experiments: one that takes its time, and the seed of the experiment."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
from holdfast.storage.locate import open_store
from holdfast.tune.run_experiment import read_status
from holdfast.tune.search import Searcher


class Waiting(Searcher):
    """Suggests a second configuration when the first trial says so."""

    def __init__(self, pipe: Path) -> None:
        super().__init__()
        self._pipe = pipe
        self._known: list[int] = []

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        known = sum(self._known)
        if trial_id.endswith("1"):
            self._pipe.read_text()
        return {"known": known}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self._known.append(1)


@pytest.mark.timeout(120)
def test_trials_go_on_while_a_searcher_takes_its_time(sandbox: Sandbox) -> None:
    """The second configuration comes when the first trial has made three reports, each of which was decided about. Of
    these the searcher learns afterwards."""
    pipe = sandbox.root / "pipe"
    os.mkfifo(pipe)

    def train(config: dict[str, Any]) -> None:
        for step in range(3):
            tune.report({"step": step})
        if tune.get_context().get_trial_id().endswith("0"):
            pipe.write_text("go")

    results = tune.Tuner(
        train,
        tune_config=tune.TuneConfig(num_samples=3, max_concurrent_trials=2, search_alg=Waiting(pipe)),
        run_config=tune.RunConfig(name="tuning", storage_path=sandbox.storage, stop={"step": 100}),
    ).fit()
    assert [one.metrics["step"] for one in results if one.metrics] == [2, 2, 2]
    known = [one.config["known"] for one in results if one.config]
    assert known[:2] == [0, 0] and known[2] >= 3


def test_what_a_searcher_raises_ends_the_experiment(sandbox: Sandbox) -> None:
    class Broken(Searcher):
        def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
            raise ZeroDivisionError("nothing to suggest")

    tuner = tune.Tuner(
        lambda config: None,
        tune_config=tune.TuneConfig(search_alg=Broken()),
        run_config=tune.RunConfig(name="tuning", storage_path=sandbox.storage),
    )
    with pytest.raises(ZeroDivisionError, match="nothing to suggest"):
        tuner.fit()


def test_the_seed_is_another_in_each_experiment_and_the_same_when_one_goes_on(sandbox: Sandbox) -> None:
    def configs(name: str, samples: int) -> list[float]:
        results = tune.Tuner(
            lambda config: {"x": config["x"]},
            param_space={"x": tune.uniform(0, 1)},
            tune_config=tune.TuneConfig(num_samples=samples),
            run_config=tune.RunConfig(name=name, storage_path=sandbox.storage),
        ).fit()
        return [one.config["x"] for one in results if one.config]

    first = configs("first", 1)
    shutil.copytree(sandbox.storage / "first", sandbox.storage / "copy")
    assert configs("second", 1) != first
    more = configs("first", 3)
    assert more[:1] == first and len(set(more)) == 3
    assert configs("copy", 3) == more


_HANGING = """
import sys, threading
from holdfast import tune
from holdfast.tune import experiment_controller
from holdfast.tune.search import Searcher

storage, patience_s, answers = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
experiment_controller._SEARCHER_PATIENCE_S = patience_s

class Hanging(Searcher):
    asked = 0

    def suggest(self, trial_id):
        self.asked += 1
        if self.asked > answers:
            print("asked", flush=True)
            threading.Event().wait()
        return {"x": 1}

def train(config):
    tune.report({"x": 1})
    threading.Event().wait()

tune.Tuner(
    train,
    tune_config=tune.TuneConfig(num_samples=2, max_concurrent_trials=2, search_alg=Hanging()),
    run_config=tune.RunConfig(name="tuning", storage_path=storage),
).fit()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("answers", [0, 1])
def test_ctrl_c_ends_an_experiment_whose_searcher_hangs(sandbox: Sandbox, answers: int) -> None:
    """Also the trial that it suggested before, which can go on later."""
    with _start_hanging(sandbox, 0.01, answers) as driver:
        _await_words(driver, "asked", *["Reported"] * answers)
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 130, errors
    assert "Traceback" not in errors
    assert sum(read_status(open_store(sandbox.storage / "tuning")).counts.values()) == answers


@pytest.mark.timeout(120)
def test_a_second_ctrl_c_does_not_wait_for_the_searcher(sandbox: Sandbox) -> None:
    with _start_hanging(sandbox, 1e6, 1) as driver:
        _await_words(driver, "asked", "Reported")
        driver.send_signal(signal.SIGINT)
        _await_words(driver, "RunInterrupted")
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 130, errors


@contextlib.contextmanager
def _start_hanging(sandbox: Sandbox, patience_s: float, answers: int) -> Iterator[subprocess.Popen[str]]:
    script = sandbox.root / "script.py"
    script.write_text(_HANGING)
    command = [sys.executable, str(script), str(sandbox.storage), str(patience_s), str(answers)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "HOLDFAST_JSON": "1"}
    with subprocess.Popen(command, cwd=sandbox.root, env=environment, stdout=pipe, stderr=pipe, text=True) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def _await_words(driver: subprocess.Popen[str], *words: str) -> None:
    """Until each of these words was printed: records are lines of JSON."""
    assert driver.stdout is not None
    left = set(words)
    while left:
        line = driver.stdout.readline()
        assert line, "the driver has ended"
        left = {word for word in left if word not in line}

"""The driver of an experiment is killed again and again, and the experiment comes out as if nothing had happened.

Trials kill it right before a report; the test kills it at any time. What an undisturbed experiment comes to is the same
on every kind of storage.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.contract import servers
from tests.faults.programs.sandbox import Sandbox

from holdfast.checkpoint.verify import verify
from holdfast.core import records as r
from holdfast.storage.locate import open_store
from holdfast.storage.uri import join
from holdfast.tune.run_experiment import read_lines

_REPOSITORY = Path(__file__).resolve().parents[2]
_SEARCHERS = ["basic", "own", "optuna", "limited", "repeated", "cma-es", "qmc", "nsga-ii", "gp"]
_SCHEDULERS = ["fifo", "asha", "hyperband", "median", "pbt", "synchronous pbt"]
_TRIALS = 6


class Experiment:
    """One experiment of `tune_main`, which any number of drivers go on with."""

    def __init__(self, sandbox: Sandbox, storage: str, searcher: str, scheduler: str, concurrent: int) -> None:
        self.storage = storage
        self._log = sandbox.root / f"{searcher} {scheduler} {concurrent} {len(list(sandbox.root.iterdir()))}.log"
        self._options = {
            "storage": storage,
            "searcher": searcher,
            "scheduler": scheduler,
            "concurrent": concurrent,
            "log": str(self._log),
        }

    def run(self, kills: Sequence[int] = (), delays_s: Sequence[float] = ()) -> Any:
        """Start drivers until one comes to the end, and kill one after each of the delays; what the last printed."""
        waiting, left = list(delays_s), len(kills)
        while True:
            delay_s = waiting.pop(0) if waiting else None
            code, found = self._run_driver(kills, delay_s)
            if code == 0:
                return found
            left -= delay_s is None
            assert left >= 0, "a driver died that nobody killed"

    def _run_driver(self, kills: Sequence[int], delay_s: float | None) -> tuple[int, Any]:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.programs.tune_main", json.dumps({**self._options, "kills": kills})],
            cwd=_REPOSITORY,
            env=os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with driver:
            try:
                try:
                    printed, errors = driver.communicate(timeout=240 if delay_s is None else delay_s)
                except subprocess.TimeoutExpired:
                    assert delay_s is not None, "the experiment does not end"
                    driver.kill()
                    printed, errors = driver.communicate(timeout=60)
            finally:
                driver.kill()
        assert driver.returncode in (0, -9), errors
        return driver.returncode, json.loads(printed) if driver.returncode == 0 else None

    def check_stored(self) -> None:
        """Every checkpoint is whole; no trial is there twice, none ran again that had ended, and what was decided of
        one was done."""
        store = open_store(join(self.storage, "tuning"))
        directories: dict[str, str] = {}
        ended: set[str] = set()
        pausing: set[str] = set()
        decided: dict[str, int] = {}
        iterations: dict[str, int] = {}
        for line in read_lines(store)[1]:
            match line.record:
                case r.TrialCreated(trial=trial, directory=directory):
                    assert trial not in directories, "a trial was created twice"
                    directories[trial] = directory
                case r.TrialStopped(trial=trial, paused=False, iteration=iteration):
                    decided.setdefault(trial, iteration)
                case r.TrialStopped(trial=trial) | r.TrialCloned(trial=trial):
                    pausing.add(trial)
                case r.RunFinished() if line.run not in pausing:
                    ended.add(line.run)
                case r.ControllerStarted():
                    pausing.discard(line.run)
                    assert line.run not in ended, "a trial that had ended ran again"
                    assert line.run not in decided, "a decision was taken back"
                case r.Reported(iteration=iteration):
                    iterations[line.run] = iteration
        assert len(directories) == len(set(directories.values())) == _TRIALS
        assert {trial for trial, iteration in decided.items() if iterations[trial] > iteration} == set()
        for directory in directories.values():
            assert verify(store.sub(directory), deep=True).intact


def choose_kills(what: str, count: int, undisturbed_s: float) -> dict[str, Sequence[Any]]:
    """So many by trials, and as many by the test."""
    draw = random.Random(what)
    return {
        "kills": sorted(draw.sample(range(1, 30), count)),
        "delays_s": [draw.uniform(0.2, max(0.3, undisturbed_s)) for _ in range(count)],
    }


def check_one_at_a_time(sandbox: Sandbox, storage: str, searcher: str, scheduler: str, kills: int = 4) -> Any:
    undisturbed = Experiment(sandbox, str(sandbox.storage / "undisturbed"), searcher, scheduler, 1)
    sandbox.storage.mkdir()
    since = time.monotonic()
    expected = undisturbed.run()
    chosen = choose_kills(f"{searcher} {scheduler}", kills, time.monotonic() - since)
    killed = Experiment(sandbox, storage, searcher, scheduler, 1)
    assert killed.run(**chosen) == expected
    killed.check_stored()
    return expected


def check_several_at_a_time(sandbox: Sandbox, storage: str, searcher: str, scheduler: str, kills: int = 4) -> None:
    sandbox.storage.mkdir()
    killed = Experiment(sandbox, storage, searcher, scheduler, 3)
    assert len(killed.run(**choose_kills(f"3 {searcher} {scheduler}", kills, 2.0))) == _TRIALS
    killed.check_stored()


@pytest.fixture
def bucket(moto: servers.Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    return moto.uri(moto.new_bucket(), "killed")


@pytest.mark.timeout(300)
def test_an_experiment_with_one_trial_at_a_time_ends_as_if_its_driver_had_never_died(sandbox: Sandbox) -> None:
    """Trials, configurations and results are the same, and so is who was stopped, and when."""
    expected = check_one_at_a_time(sandbox, str(sandbox.storage / "killed"), "basic", "asha", kills=2)
    assert len({iterations for iterations, *_ in expected}) > 1, "the scheduler stopped nobody"


@pytest.mark.timeout(300)
def test_an_experiment_in_a_bucket_with_several_trials_at_a_time_loses_and_repeats_none(
    sandbox: Sandbox, bucket: str
) -> None:
    check_several_at_a_time(sandbox, bucket, "own", "pbt", kills=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheduler", _SCHEDULERS)
@pytest.mark.parametrize("searcher", _SEARCHERS)
class TestEverySearcherAndScheduler:
    def test_one_trial_at_a_time_is_exact_on_a_disk(self, sandbox: Sandbox, searcher: str, scheduler: str) -> None:
        _need(searcher)
        check_one_at_a_time(sandbox, str(sandbox.storage / "killed"), searcher, scheduler)

    def test_one_trial_at_a_time_is_exact_in_a_bucket(
        self, sandbox: Sandbox, bucket: str, searcher: str, scheduler: str
    ) -> None:
        _need(searcher)
        check_one_at_a_time(sandbox, bucket, searcher, scheduler)

    def test_several_at_a_time_on_a_disk_lose_and_repeat_none(
        self, sandbox: Sandbox, searcher: str, scheduler: str
    ) -> None:
        _need(searcher)
        check_several_at_a_time(sandbox, str(sandbox.storage / "killed"), searcher, scheduler)

    def test_several_at_a_time_in_a_bucket_lose_and_repeat_none(
        self, sandbox: Sandbox, bucket: str, searcher: str, scheduler: str
    ) -> None:
        _need(searcher)
        check_several_at_a_time(sandbox, bucket, searcher, scheduler)


def _need(searcher: str) -> None:
    if searcher not in ("basic", "own"):
        pytest.importorskip("optuna")
    if searcher == "cma-es":
        pytest.importorskip("cmaes")
    if searcher == "gp":
        pytest.importorskip("scipy")
        pytest.importorskip("torch")

"""The driver of an experiment is killed again and again, and the experiment comes out as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast.checkpoint.verify import verify
from holdfast.storage.locate import open_store

_REPOSITORY = Path(__file__).resolve().parents[2]
_SEARCHERS = ["basic", "optuna", "limited", "repeated"]
_SCHEDULERS = ["fifo", "asha", "hyperband", "median", "pbt", "synchronous pbt"]


def run_driver(storage: Path, searcher: str, scheduler: str, concurrent: int, *kills: int) -> tuple[int, Any]:
    arguments = [str(storage), searcher, scheduler, str(concurrent), *map(str, kills)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.programs.tune_main", *arguments],
        cwd=_REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None


def run_with_kills(storage: Path, searcher: str, scheduler: str, concurrent: int, kills: tuple[int, ...]) -> Any:
    """Start drivers until one comes to the end; what that one prints."""
    for _ in range(len(kills) + 1):
        code, found = run_driver(storage, searcher, scheduler, concurrent, *kills)
        if code == 0:
            break
    assert code == 0, "a driver died that nobody killed"
    for trial in (storage / "tuning").glob("train_*"):
        assert verify(open_store(trial), deep=True).intact
    return found


def read_journal(storage: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted((storage / "tuning" / "journal").glob("*.jsonl"))]
    return [json.loads(line) for line in "".join(texts).splitlines()]


def check_one_at_a_time(sandbox: Sandbox, searcher: str, scheduler: str, kills: tuple[int, ...]) -> Any:
    sandbox.storage.mkdir(exist_ok=True)
    code, expected = run_driver(sandbox.storage / "undisturbed", searcher, scheduler, 1)
    assert code == 0
    assert run_with_kills(sandbox.storage / "killed", searcher, scheduler, 1, kills) == expected
    return expected


@pytest.mark.timeout(300)
def test_an_experiment_with_one_trial_at_a_time_ends_as_if_its_driver_had_never_died(sandbox: Sandbox) -> None:
    """Trials, configurations and results are the same, and so is who was stopped, and when."""
    expected = check_one_at_a_time(sandbox, "basic", "asha", (3, 11))
    assert len({iterations for iterations, *_ in expected}) > 1, "the scheduler stopped nobody"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scheduler", _SCHEDULERS)
@pytest.mark.parametrize("searcher", _SEARCHERS)
def test_every_searcher_and_scheduler_is_exact_after_many_kills(
    sandbox: Sandbox, searcher: str, scheduler: str
) -> None:
    if searcher != "basic":
        pytest.importorskip("optuna")
    kills = tuple(sorted(random.Random(f"{searcher} {scheduler}").sample(range(1, 40), 6)))
    check_one_at_a_time(sandbox, searcher, scheduler, kills)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scheduler", _SCHEDULERS)
def test_no_trial_is_lost_or_run_twice_with_several_at_a_time(sandbox: Sandbox, scheduler: str) -> None:
    sandbox.storage.mkdir()
    kills = tuple(sorted(random.Random(scheduler).sample(range(1, 40), 6)))
    found = run_with_kills(sandbox.storage / "killed", "basic", scheduler, 3, kills)
    assert len(found) == 6
    ended: set[str] = set()
    created: list[str] = []
    for line in read_journal(sandbox.storage / "killed"):
        match line.get("kind"):
            case "TrialCreated":
                created.append(line["trial"])
            case "TrialStopped" if not line.get("paused"):
                ended.add(line["trial"])
            case "ControllerStarted":
                assert line["run"] not in ended, "a decision was taken back"
    assert len(created) == len(set(created)) == 6

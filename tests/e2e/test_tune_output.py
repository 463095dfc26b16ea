"""`RunConfig(log_to_file=...)`: files of the user's choice in each trial's directory that its output is appended to,
over all restarts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.contract import servers
from tests.e2e.test_tune import make_tuner
from tests.faults.programs.sandbox import Sandbox

from holdfast import train, tune
from holdfast.storage.locate import open_store
from holdfast.storage.uri import join
from holdfast.train import DataParallelTrainer, FailureConfig, ScalingConfig
from holdfast.tune.result_grid import ResultGrid


def say(what: str) -> None:
    print(what)
    print(f"! {what}", file=sys.stderr)


def read(results: ResultGrid, name: str) -> list[str]:
    """That file of each trial."""
    return [Path(result.path, name).read_text() for result in results]


def test_the_output_of_each_trial_goes_to_two_files(sandbox: Sandbox) -> None:
    def talk(config: dict[str, Any]) -> None:
        say(f"trial {config['x']}")

    results = make_tuner(sandbox, talk, {"x": tune.grid_search([1, 2])}, run={"log_to_file": True}).fit()
    assert read(results, "stdout") == ["trial 1\n", "trial 2\n"]
    assert read(results, "stderr") == ["! trial 1\n", "! trial 2\n"]


class Talking(tune.Trainable):
    def step(self) -> dict[str, Any]:
        say("step")
        return {"done": True}


def test_a_class_may_have_both_streams_in_one_file(sandbox: Sandbox) -> None:
    results = make_tuner(sandbox, Talking, {}, run={"log_to_file": "out/all.txt"}).fit()
    (text,) = read(results, "out/all.txt")
    assert sorted(text.splitlines()) == ["! step", "step"]


def test_of_a_trial_with_several_workers_it_is_the_output_of_rank_0(sandbox: Sandbox) -> None:
    def talk(config: dict[str, Any]) -> None:
        say(f"rank {train.get_context().get_world_rank()}")

    trainer = DataParallelTrainer(talk, train_loop_config={}, scaling_config=ScalingConfig(num_workers=2))
    results = make_tuner(sandbox, trainer, {}, run={"log_to_file": ("a.out", "a.err")}).fit()
    assert read(results, "a.out") == ["rank 0\n"]
    assert read(results, "a.err") == ["! rank 0\n"]


def test_restarts_of_workers_and_of_the_driver_append(
    sandbox: Sandbox, moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bucket, where nothing can be appended to. A call later the setting is still known."""
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    bucket = moto.uri(moto.new_bucket(), "runs")
    calls = sandbox.root / "calls"

    def fragile(config: dict[str, Any]) -> None:
        with calls.open("a") as file:
            file.write("x")
        call = len(calls.read_text())
        print("call", call)
        if call < 4:
            raise ValueError("not today")

    run = {"storage_path": bucket, "log_to_file": ("printed", "warned"), "failure_config": FailureConfig(1)}
    assert make_tuner(sandbox, fragile, {}, run=run).fit().num_errors == 1
    results = tune.Tuner.restore(join(bucket, "tuning"), fragile, resume_errored=True).fit()
    assert results.num_errors == 0
    store = open_store(join(bucket, f"tuning/{Path(results[0].path).name}"))
    assert store.get("printed") == b"call 1\ncall 2\ncall 3\ncall 4\n"
    assert b"not today" not in store.get("printed")

"""Searchers in real experiments: one that takes its time, and the seed of the experiment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
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
        if config["known"] == 0 and pipe.exists():
            pipe.write_text("go")
            pipe.unlink()

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

"""A longer version of a trial that has ended starts from its checkpoint: no work is done twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
from holdfast.checkpoint.verify import verify
from holdfast.errors import ConfigError
from holdfast.storage.locate import open_store


def make_tuner(sandbox: Sandbox, samples: int = 1) -> tune.Tuner:
    def climb(config: dict[str, Any]) -> None:
        step = 0
        if (checkpoint := tune.get_checkpoint()) is not None:
            step = checkpoint.to_dict()["step"]
        while step < config["training"]["epochs"]:
            step += 1
            with Path(config["calls"]).open("a") as file:
                file.write(f"{config['x']}:{step}\n")
            tune.report({"height": step * config["x"]}, checkpoint=tune.Checkpoint.from_dict({"step": step}))

    return tune.Tuner(
        climb,
        param_space={
            "x": tune.grid_search([1, 2]),
            "training": {"epochs": tune.grid_search([4, 2, 7])},
            "calls": str(sandbox.root / "calls"),
        },
        tune_config=tune.TuneConfig(num_samples=samples, max_concurrent_trials=1, budget="training/epochs"),
        run_config=tune.RunConfig(
            name="tuning", storage_path=sandbox.storage, checkpoint_config=tune.CheckpointConfig(num_to_keep=1)
        ),
    )


def steps_of(sandbox: Sandbox) -> dict[int, list[int]]:
    """What was done, by x."""
    found: dict[int, list[int]] = {}
    for call in (sandbox.root / "calls").read_text().split():
        x, _, step = call.partition(":")
        found.setdefault(int(x), []).append(int(step))
    return found


def test_a_longer_version_of_a_trial_starts_from_its_end(sandbox: Sandbox) -> None:
    """A shorter one does not, and neither does one of another configuration, or one that is just as long."""
    results = make_tuner(sandbox).fit()
    heights = [(one.config["x"], one.metrics["height"]) for one in results if one.config and one.metrics]
    assert sorted(heights) == [(1, 2), (1, 4), (1, 7), (2, 4), (2, 8), (2, 14)]
    assert steps_of(sandbox) == {x: [1, 2, 3, 4, 1, 2, 5, 6, 7] for x in (1, 2)}
    assert [one.metrics["training_iteration"] for one in results if one.metrics] == [4, 4, 2, 2, 7, 7]
    for one in results:
        assert verify(open_store(one.path), deep=True).intact
    (sandbox.root / "calls").unlink()
    assert len(make_tuner(sandbox, samples=2).fit()) == 12
    assert steps_of(sandbox) == {x: [3, 4, 1, 2, 5, 6, 7] for x in (1, 2)}


def test_the_checkpoint_of_the_shorter_one_is_linked(sandbox: Sandbox) -> None:
    """Its bytes are there once."""

    def hold(config: dict[str, Any]) -> None:
        found = tune.get_checkpoint()
        if found is None:
            tune.report({"x": 1}, checkpoint=tune.Checkpoint.from_dict({"x": 1}))
        else:
            tune.report({"x": 2})

    results = tune.Tuner(
        hold,
        param_space={"epochs": tune.grid_search([1, 2])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, budget="epochs"),
        run_config=tune.RunConfig(name="tuning", storage_path=sandbox.storage),
    ).fit()
    assert [one.metrics["x"] for one in results if one.metrics] == [1, 2]
    inodes = []
    for one in results:
        assert one.checkpoint is not None
        inodes.append({path.stat().st_ino for path in Path(one.checkpoint.path).iterdir() if path.name[0] != "."})
    assert inodes[0] and inodes[0] == inodes[1]


def test_a_budget_is_the_name_of_a_parameter() -> None:
    with pytest.raises(ConfigError, match=r"TuneConfig\(budget\) must be"):
        tune.TuneConfig(budget=3)  # type: ignore[arg-type]

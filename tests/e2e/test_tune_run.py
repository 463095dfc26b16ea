"""`tune.run` and `ExperimentAnalysis`, as scripts use them that were written before there was a `Tuner`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
from holdfast.errors import ConfigError


def test_an_old_script_finds_its_best_trial(sandbox: Sandbox) -> None:
    """By name of a registered trainable, with older arguments; the analysis of its directory says the same."""

    def objective(config: dict[str, Any]) -> None:
        for step in range(3):
            state = tune.Checkpoint.from_dict({"x": config["x"], "step": step})
            tune.report({"loss": (config["x"] - 2) ** 2 + step * config["slope"]}, checkpoint=state)
        assert tune.get_context().get_trial_resources().required_resources == {"CPU": 0.5}

    tune.register_trainable("objective", objective)
    analysis = tune.run(
        "objective",
        name="old",
        config={"x": tune.grid_search([1, 2, 4]), "slope": 1},
        resources_per_trial={"cpu": 0.5},
        local_dir=str(sandbox.storage),
        metric="loss",
        mode="min",
        scheduler="fifo",
        checkpoint_score_attr="min-loss",
        keep_checkpoints_num=2,
        verbose=0,
    )
    opened = tune.ExperimentAnalysis(sandbox.storage / "old")
    for found in (analysis, opened):
        assert found.best_config == {"x": 2, "slope": 1}
        assert (found.best_result["loss"], found.best_trial.status) == (2, "TERMINATED")
        assert found.get_best_config("loss", "max", scope="all") == {"x": 4, "slope": 1}
        assert sorted(result["loss"] for result in found.results.values()) == [2, 3, 6]
        assert len(found.dataframe()) == 3 and found.dataframe("loss", "min")["loss"].min() == 0
        assert list(found.trial_dataframes[found.best_trial.trial_id]["loss"]) == [0, 1, 2]
        assert found.best_checkpoint is not None and found.best_checkpoint.to_dict() == {"x": 2, "step": 0}
        newest = found.get_last_checkpoint(found.best_trial)
        assert newest is not None and newest.to_dict() == {"x": 2, "step": 2}
        assert found.get_best_trial("nothing", "min") is None
        assert Path(found.experiment_path) == sandbox.storage / "old"
        assert found.get_all_configs(prefix=True)[found.best_trial.trial_id] == {"config/x": 2, "config/slope": 1}
        assert list(found.results_df["loss"]) == [3, 2, 6] and list(found.best_result_df["loss"]) == [2]


def test_failed_trials_raise_unless_they_are_asked_for(sandbox: Sandbox) -> None:
    good = sandbox.root / "good"

    def fragile(config: dict[str, Any]) -> dict[str, Any]:
        if config["x"] and not good.exists():
            raise ValueError("not today")
        return {"x": config["x"]}

    arguments: dict[str, Any] = {
        "config": {"x": tune.grid_search([0, 1])},
        "name": "fragile",
        "storage_path": sandbox.storage,
    }
    with pytest.raises(tune.TuneError, match=r"1 of 2 trials failed .*not today"):
        tune.run(fragile, **arguments)
    left = tune.run(fragile, raise_on_failed_trial=False, resume=True, **arguments)
    assert [trial.status for trial in left.trials] == ["TERMINATED", "ERROR"]
    good.touch()
    trials = tune.run_experiments(tune.Experiment(run=fragile, **arguments), resume="AUTO+ERRORED")
    assert [trial.status for trial in trials] == ["TERMINATED", "TERMINATED"]


def test_what_tune_run_does_not_know_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"resume": "SOMETIMES"}, "tune.run.resume. must be"),
        ({"restore": "/x"}, "tune.run.restore. must be the path of a checkpoint"),
        ({"resume": True}, "holds no experiment"),
        ({"scheduler": "best"}, "must be one of"),
        ({"resume_config": tune.ResumeConfig(unfinished="skip"), "resume": "LOCAL"}, "holds no experiment"),
    ]
    for arguments, match in cases:
        with pytest.raises(ConfigError, match=match):
            tune.run(lambda config: None, storage_path=tmp_path, **arguments)
    with pytest.raises(ConfigError, match="No trainable is registered as 'unknown'"):
        tune.run("unknown")
    with pytest.raises(ConfigError, match="never run again"):
        tune.ResumeConfig(finished="restart")
    empty = tune.ResultGrid([], Mock(), Mock(), experiment_path="")
    with pytest.raises(ConfigError, match=r"best_config needs tune\.run"):
        _ = tune.ExperimentAnalysis._of_results(empty, None, None).best_config


def test_a_metric_that_trials_do_not_report_ends_the_experiment_at_the_first_report(sandbox: Sandbox) -> None:
    def endless(config: dict[str, Any]) -> None:
        while True:
            tune.report({"loss": 1})

    with pytest.raises(ConfigError, match=r'reported no metric "acc".*TuneConfig\(metric=\.\.\.\): loss\.'):
        tune.run(endless, storage_path=sandbox.storage, metric="acc", mode="max")


def test_trials_start_from_a_checkpoint_that_is_given(sandbox: Sandbox) -> None:
    """Also one that goes on: its own checkpoint wins."""

    def climb(config: dict[str, Any]) -> None:
        checkpoint = tune.get_checkpoint()
        assert checkpoint is not None
        step = checkpoint.to_dict()["step"]
        tune.report({"step": step + 1}, checkpoint=tune.Checkpoint.from_dict({"step": step + 1}))
        if step < config["until"]:
            raise ValueError("not yet")

    given = sandbox.root / "given"
    tune.Checkpoint.from_dict({"step": 5}).to_directory(str(given))
    found = tune.run(
        climb,
        config={"until": tune.grid_search([0, 6])},
        name="restored",
        storage_path=sandbox.storage,
        restore=str(given),
        max_failures=3,
    )
    assert [trial.last_result["step"] for trial in found.trials] == [6, 7]

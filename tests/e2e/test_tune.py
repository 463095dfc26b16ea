"""Experiments with real trials: results, files, stopping, failures, going on with more, and the cost of a trial."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import fit
from tests.faults.programs.sandbox import Sandbox

from holdfast import tune
from holdfast.checkpoint.verify import verify
from holdfast.control.loop import Settings
from holdfast.errors import ConfigError
from holdfast.storage.locate import open_store
from holdfast.train import DataParallelTrainer, Result, ScalingConfig
from holdfast.tune.schedulers import AsyncHyperBandScheduler, PopulationBasedTraining


def make_tuner(sandbox: Sandbox, trainable: Any, space: dict[str, Any], **others: Any) -> tune.Tuner:
    run = {"name": "tuning", "storage_path": sandbox.storage, **others.pop("run", {})}
    return tune.Tuner(
        trainable, param_space=space, tune_config=tune.TuneConfig(**others), run_config=tune.RunConfig(**run)
    )


def test_a_grid_is_tried_and_more_samples_extend_it(sandbox: Sandbox) -> None:
    """Trials that ended are not run again, and each has its files, which are enough for a `Result`."""
    calls = sandbox.root / "calls"

    def count(config: dict[str, Any]) -> None:
        with calls.open("a") as file:
            file.write("x")
        for step in range(3):
            tune.report({"loss": config["a"]["b"] - step, "constant": config["constant"]})

    space = {"a": {"b": tune.grid_search([5, 3])}, "x/y": tune.uniform(0, 1), "constant": "c"}
    results = make_tuner(sandbox, count, space, metric="loss", mode="min").fit()
    assert all(one.config is not None and 0 <= one.config["x/y"] <= 1 for one in results)
    assert len(results) == results.num_terminated == 2 and not results.errors
    best = results.get_best_result()
    assert best.metrics is not None and best.config is not None
    assert (best.metrics["loss"], best.metrics["training_iteration"], best.config["a"]) == (1, 3, {"b": 3})
    again = make_tuner(sandbox, count, space, metric="loss", mode="min", num_samples=2)
    assert len(again.get_results()) == 2
    assert len(again.fit()) == 4
    assert len(calls.read_text()) == 4
    assert len(make_tuner(sandbox, count, space, num_samples=2).fit()) == 4
    assert len(calls.read_text()) == 4

    for trial in (sandbox.storage / "tuning").glob("count_*"):
        config = json.loads((trial / "params.json").read_text())
        found = Result.from_path(trial)
        assert found.metrics is not None and found.metrics["loss"] == config["a"]["b"] - 2
        assert len((trial / "progress.csv").read_text().splitlines()) == 4
    with pytest.raises(ConfigError, match="param_space is not what"):
        make_tuner(sandbox, count, {"x": 1}).fit()
    with pytest.raises(ConfigError, match="holds a tuning experiment"):
        fit(sandbox, lambda: None, workers=0, name="tuning")


def test_a_trial_is_stopped_at_the_report_that_decides_it(sandbox: Sandbox) -> None:
    """By a scheduler, or by a stop condition; what the function does after that report never happens."""

    def endless(config: dict[str, Any]) -> None:
        step = 0
        try:
            while True:
                step += 1
                tune.report({"loss": config["x"]})
        finally:
            Path(config["ends"], str(config["x"])).write_text(str(step))

    ends = sandbox.root / "ends"
    ends.mkdir()
    results = make_tuner(
        sandbox,
        endless,
        {"x": tune.grid_search([1, 2, 3, 4]), "ends": str(ends)},
        metric="loss",
        mode="min",
        max_concurrent_trials=1,
        scheduler=AsyncHyperBandScheduler(max_t=100, grace_period=2, reduction_factor=2),
        run={"stop": {"training_iteration": 5}},
    ).fit()
    assert [result.metrics["training_iteration"] for result in results if result.metrics] == [5, 2, 2, 2]
    assert [(ends / str(x)).read_text() for x in (1, 2, 3, 4)] == ["5", "2", "2", "2"]


def test_a_later_stop_condition_lets_trials_go_on_from_their_checkpoints(sandbox: Sandbox) -> None:
    """Those that it would have let go on; nothing is done twice."""
    calls = sandbox.root / "calls"

    def climb(config: dict[str, Any]) -> None:
        step = 0
        if (checkpoint := tune.get_checkpoint()) is not None:
            with checkpoint.as_directory() as directory:
                step = int(Path(directory, "step").read_text())
        while step < config["most"]:
            step += 1
            with calls.open("a") as file:
                file.write(f"{config['most']}:{step}\n")
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "step").write_text(str(step))
                tune.report({"height": step}, checkpoint=tune.Checkpoint.from_directory(directory))

    def run(height: int) -> list[int]:
        found = make_tuner(
            sandbox,
            climb,
            {"most": tune.grid_search([1, 9])},
            max_concurrent_trials=1,
            run={"stop": {"height": height}},
        ).fit()
        return [result.metrics["height"] for result in found if result.metrics]

    assert run(2) == [1, 2]
    assert run(4) == [1, 4]
    assert run(3) == [1, 4]
    assert calls.read_text().split() == ["1:1", "9:1", "9:2", "9:3", "9:4"]


def test_a_failed_trial_is_told_of_and_can_be_tried_again(sandbox: Sandbox) -> None:
    good = sandbox.root / "good"

    def fragile(config: dict[str, Any]) -> dict[str, Any]:
        if config["x"] == 1 and not good.exists():
            raise ValueError("not today")
        return {"score": config["x"]}

    space = {"x": tune.grid_search([0, 1, 2])}
    results = make_tuner(sandbox, fragile, space, metric="score", mode="max").fit()
    assert (results.num_errors, results.num_terminated) == (1, 2)
    assert "not today" in str(results.errors[0]) and "resume_errored=True) continues the trial" in str(
        results.errors[0]
    )
    assert "ValueError: not today" in str(Result.from_path(results[1].path).error)
    assert results.get_best_result().metrics["score"] == 2  # type: ignore[index]
    assert "not today" in next((sandbox.storage / "tuning").glob("*x=1/error.txt")).read_text()
    good.touch()
    path = sandbox.storage / "tuning"
    assert tune.Tuner.can_restore(path) and not tune.Tuner.can_restore(sandbox.storage)
    assert tune.Tuner.restore(path, fragile).fit().num_errors == 1
    both = tune.Tuner.restore(path, fragile, resume_errored=True, restart_errored=True)
    assert both._errored == "resume", "as in Ray"
    mended = tune.Tuner.restore(path, fragile, restart_errored=True).fit()
    assert (mended.num_errors, mended.num_terminated) == (0, 3)
    assert Result.from_path(results[1].path).error is None
    with pytest.raises(ConfigError, match="trainable"):
        tune.Tuner.restore(path)


def test_values_that_cannot_be_stored_are_found_in_the_space_again(sandbox: Sandbox) -> None:
    """Such as classes of the script itself. What only a function made is gone, and the trial says so."""
    good = sandbox.root / "good"
    shown: list[str] = []

    class Model:
        size = 3

    class Other:
        size = 4

    class Shown(tune.Callback):
        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            shown.append(trial.config["model"].__name__)

    def fragile(config: dict[str, Any]) -> dict[str, Any]:
        assert good.exists()
        return {"size": config["model"].size}

    space = {"model": tune.grid_search([Model, Other]), "made": tune.sample_from(lambda config: config["model"]())}
    assert make_tuner(sandbox, fragile, space).fit().num_errors == 2
    good.touch()
    results = tune.Tuner.restore(sandbox.storage / "tuning", fragile, param_space=space, resume_errored=True).fit()
    assert [str(error).partition("its ")[2] for error in results.errors] == [
        f"configuration has an object of {__name__}.{kind.__qualname__}, which could not be stored and is not in "
        "param_space: let functions and searchers give plain values."
        for kind in (Model, Other)
    ]

    good.unlink()
    del space["made"]
    run = {"name": "again", "callbacks": [Shown()]}
    assert make_tuner(sandbox, fragile, space, run=run).fit().num_errors == 2
    assert sorted(shown) == ["Model", "Other"]
    good.touch()
    tuner = tune.Tuner.restore(sandbox.storage / "again", fragile, param_space=space, resume_errored=True)
    assert [result.metrics["size"] for result in tuner.fit() if result.metrics] == [3, 4]


class Counter(tune.Trainable):
    """Counts up to what it was given, in a file of its checkpoint."""

    def setup(self, config: dict[str, Any], limit: int = 0) -> None:
        self.value, self.limit = config["start"], limit

    def step(self) -> dict[str, Any]:
        self.value += 1
        return {"value": self.value, "done": self.iteration + 1 == self.limit}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "value").write_text(str(self.value))

    def load_checkpoint(self, checkpoint: str) -> None:
        self.value = int(Path(checkpoint, "value").read_text())


def test_a_class_and_a_trainer_are_trainables(sandbox: Sandbox) -> None:
    results = make_tuner(
        sandbox,
        tune.with_resources(tune.with_parameters(Counter, limit=4), {"cpu": 0.5}),
        {"start": tune.grid_search([10, 20])},
        run={"checkpoint_config": tune.CheckpointConfig(checkpoint_frequency=3, checkpoint_at_end=True)},
    ).fit()
    assert [result.metrics["value"] for result in results if result.metrics] == [14, 24]
    for result, value in zip(results, ("14", "24"), strict=True):
        assert result.checkpoint is not None
        assert [name.name for name in sorted(Path(result.path).glob("checkpoint_*"))] == [
            "checkpoint_000000",
            "checkpoint_000001",
        ]
        with result.checkpoint.as_directory() as directory:
            assert Path(directory, "value").read_text() == value

    def ranks(config: dict[str, Any]) -> None:
        tune.report({"size": tune.get_context().get_world_size(), "x": config["x"]})

    trainer = DataParallelTrainer(ranks, train_loop_config={"x": 0}, scaling_config=ScalingConfig(num_workers=2))
    space = {"train_loop_config": {"x": tune.grid_search([7, 8])}}
    results = make_tuner(sandbox, trainer, space, run={"name": "gangs"}).fit()
    assert [(result.metrics["size"], result.metrics["x"]) for result in results if result.metrics] == [(2, 7), (2, 8)]
    sizes = tune.grid_search([ScalingConfig(num_workers=1), ScalingConfig(num_workers=2)])
    results = make_tuner(sandbox, trainer, {"scaling_config": sizes}, run={"name": "sizes"}).fit()
    assert [result.metrics["size"] for result in results if result.metrics] == [1, 2]
    assert results[1].path.endswith("_scaling_config=ScalingConfig_num_workers=2_")


class Loaded:
    """Notes each time that it is opened."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __getstate__(self) -> Path:
        return self.log

    def __setstate__(self, log: Path) -> None:
        self.log = log
        with log.open("a") as file:
            file.write("opened\n")


class Reader(tune.Trainable):
    def setup(self, config: dict[str, Any], data: Loaded | None = None) -> None:
        assert data is not None
        with data.log.open("a") as file:
            file.write("setup\n")

    def step(self) -> dict[str, Any]:
        return {"done": True}


def test_what_a_trainable_is_given_is_opened_once_for_all_its_trials(sandbox: Sandbox) -> None:
    """So `setup` need not load it again, though each trial is a process of its own."""
    log = sandbox.root / "log"
    space = {"x": tune.grid_search([1, 2, 3])}
    with pytest.warns(UserWarning, match=r"reuse_actors.*tune.with_parameters"):
        tuner = make_tuner(sandbox, tune.with_parameters(Reader, data=Loaded(log)), space, reuse_actors=True)
    assert not tuner.fit().errors
    assert sorted(log.read_text().split()) == ["opened", "setup", "setup", "setup"]


_MODULE = """
import os
from pathlib import Path
from holdfast import tune

with Path(os.environ["LOG"]).open("a") as log:
    log.write("loaded\\n")

class Reader(tune.Trainable):
    def step(self):
        return {"done": True}
"""


def test_what_a_trainables_module_loads_is_loaded_once_for_all_its_trials(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the driver, and by the process that trials are forked from."""
    log = sandbox.root / "log"
    (sandbox.root / "reading_module.py").write_text(_MODULE)
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.syspath_prepend(sandbox.root)
    trainable = importlib.import_module("reading_module").Reader
    assert not make_tuner(sandbox, trainable, {"x": tune.grid_search([1, 2, 3])}).fit().errors
    assert log.read_text().split() == ["loaded", "loaded"]


def test_a_trial_waits_for_the_disk_twice(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest of a shared lease: before its workers start, and for its end. Those of the experiment itself are as many
    as a run's. Records that nobody waits for wait for these."""
    monkeypatch.setattr("holdfast.control.setup._settings", lambda _: Settings(flush_s=600.0, minor_flush_s=600.0))
    synced: list[str] = []
    for name in ("fsync", "fdatasync"):
        sync = getattr(os, name)

        def noting(fd: int, sync: Any = sync) -> None:
            synced.append("")
            sync(fd)

        monkeypatch.setattr(os, name, noting)
    trials = 12
    make_tuner(sandbox, lambda config: {"x": config["x"]}, {"x": tune.uniform(0, 1)}, num_samples=trials).fit()
    assert len(synced) <= 10 + 2 * trials


def test_population_based_training_goes_on_from_the_best_trials_checkpoints(sandbox: Sandbox) -> None:
    """Two at a time of four: trials take turns. A copy has the donor's state, linked, and a configuration of its own;
    retention, which keeps one checkpoint, has left the donor's alone."""

    def grow(config: dict[str, Any]) -> None:
        step, value, ancestry = 0, 0.0, [config["name"]]
        if (checkpoint := tune.get_checkpoint()) is not None:
            with checkpoint.as_directory() as directory:
                step, value, ancestry = json.loads(Path(directory, "state").read_text())
        while step < 9:
            step, value = step + 1, value + config["rate"]
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "state").write_text(json.dumps([step, value, ancestry]))
                tune.report(
                    {"value": value, "from": ancestry[0], "rate": config["rate"]},
                    checkpoint=tune.Checkpoint.from_directory(directory),
                )

    results = make_tuner(
        sandbox,
        grow,
        {"name": tune.grid_search(["a", "b", "c", "d"]), "rate": tune.sample_from(lambda spec: ord(spec["name"]) - 96)},
        metric="value",
        mode="max",
        max_concurrent_trials=2,
        scheduler=PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=2,
            hyperparam_mutations={"rate": tune.uniform(1, 4)},
            resample_probability=0.0,
        ),
        run={"checkpoint_config": tune.CheckpointConfig(num_to_keep=1)},
    ).fit()
    assert not results.errors
    assert [result.metrics["training_iteration"] for result in results if result.metrics] == [9] * 4
    journal = "".join(path.read_text() for path in sorted((sandbox.storage / "tuning" / "journal").iterdir()))
    clones = [json.loads(line) for line in journal.splitlines() if '"TrialCloned"' in line]
    assert clones, "nobody was in the worst quarter"
    assert len({result.metrics["from"] for result in results if result.metrics}) < 4
    for result in results:
        assert result.metrics is not None and result.config is not None
        assert result.metrics["rate"] == result.config["rate"]
        assert json.loads(Path(result.path, "params.json").read_text())["rate"] == result.config["rate"]
        assert verify(open_store(result.path), deep=True).intact


def test_checkpoints_of_trials_are_kept_apart(sandbox: Sandbox) -> None:
    def keep(config: dict[str, Any]) -> None:
        for step in range(3):
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "state").write_text(f"{config['x']} {step}")
                tune.report({"step": step}, checkpoint=tune.Checkpoint.from_directory(directory))

    checkpoints = tune.CheckpointConfig(num_to_keep=1)
    space = {"x": tune.grid_search([1, 2, 3])}
    results = make_tuner(sandbox, keep, space, run={"checkpoint_config": checkpoints}).fit()
    for x, result in enumerate(results, 1):
        assert result.checkpoint is not None
        assert [path.name for path in Path(result.path).glob("checkpoint_*")] == ["checkpoint_000002"]
        with result.checkpoint.as_directory() as directory:
            assert Path(directory, "state").read_text() == f"{x} 2"

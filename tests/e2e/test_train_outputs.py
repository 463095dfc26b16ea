"""The files that a run writes for people and tools, and reading them back from anywhere."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import save
from tests.faults.programs.sandbox import Sandbox
from tests.mounts import read_only_bind

from holdfast import train
from holdfast.errors import TrainingFailedError
from holdfast.train import Checkpoint, Result, RunConfig, ScalingConfig, SyncConfig


def _learn(config: dict[str, Any]) -> str:
    """Four reports, a checkpoint with every second; fails once after the third."""
    checkpoint = train.get_checkpoint()
    start = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, "step").read_text())
    for step in range(start, 4):
        if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise OSError("the disk hiccuped")
        print(f"step {step}")
        phase = "warm" if step < 2 else "hot"
        metrics = {"loss": 1 / (step + 1), "lr": {"head": 0.1 * config["scale"]}, "phase": phase}
        if step % 2 == 0:
            train.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step + 1))
            train.report(metrics, checkpoint=Checkpoint.from_directory(directory))
    return "learned"


def _fit(sandbox: Sandbox, max_failures: int = 1, **run: Any) -> Result:
    return train.DataParallelTrainer(
        _learn,
        train_loop_config={"scale": 2, "layers": [1, 2]},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="run",
            storage_path=sandbox.storage,
            failure_config=train.FailureConfig(max_failures=max_failures),
            **run,
        ),
    ).fit()


def test_result_files_of_a_finished_run(sandbox: Sandbox) -> None:
    _fit(sandbox)
    run = sandbox.storage / "run"
    lines = [json.loads(line) for line in (run / "result.json").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert [line["training_iteration"] for line in lines] == [1, 2, 3, 4]
    assert lines[1]["checkpoint_dir_name"] == "checkpoint_000000"
    with (run / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["lr/head"]) for row in rows] == [0.2] * 4
    assert [row["phase"] for row in rows] == ["warm", "warm", "hot", "hot"]
    params = json.loads((run / "params.json").read_text())
    assert params["train_loop_config"] == {"scale": 2, "layers": [1, 2]}
    assert not (run / "error.txt").exists()
    assert sorted(path.name for path in run.glob("checkpoint_*")) == ["checkpoint_000000", "checkpoint_000001"]
    assert (run / "checkpoint_000001" / "step").read_text() == "4"
    assert "step 0" in sandbox.log(1, 0)
    assert "the disk hiccuped" in sandbox.log(1, 0)
    assert not [path for path in run.rglob("*") if path.suffix in (".pkl", ".pickle")]


def test_tensorboard_reads_one_curve_in_spite_of_the_recovery(sandbox: Sandbox) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _fit(sandbox)
    events = EventAccumulator(str(sandbox.storage / "run"))
    events.Reload()
    assert {"loss", "lr/head"} <= set(events.Tags()["scalars"])
    curve = [(event.step, round(event.value, 6)) for event in events.Scalars("loss")]
    assert curve == [(1, 1.0), (2, 0.5), (3, round(1 / 3, 6)), (4, 0.25)]


def test_a_failed_run_has_error_txt_and_result_error(sandbox: Sandbox) -> None:
    with pytest.raises(TrainingFailedError, match="the disk hiccuped"):
        _fit(sandbox, max_failures=0)
    text = (sandbox.storage / "run" / "error.txt").read_text()
    assert "OSError: the disk hiccuped" in text
    assert "_learn" in text
    result = Result.from_path(sandbox.storage / "run")
    assert isinstance(result.error, TrainingFailedError)
    assert isinstance(result.error.worker_failures[0], OSError)
    assert result.metrics is not None and result.metrics["loss"] == 1 / 3
    assert result.checkpoint is not None and result.checkpoint.path.endswith("checkpoint_000000")


@pytest.mark.hosts
def test_a_result_is_read_from_read_only_storage(sandbox: Sandbox) -> None:
    done = _fit(sandbox)
    with read_only_bind(sandbox.storage, sandbox.root / "mounted") as mounted:
        with pytest.raises(OSError):
            (mounted / "probe").touch()
        result = Result.from_path(mounted / "run")
        assert result.return_value == "learned"
        assert result.metrics == done.metrics
        assert result.checkpoint is not None
        with result.checkpoint.as_directory() as directory:
            assert Path(directory, "step").read_text() == "4"


def test_a_run_directory_that_was_moved_is_read_at_its_new_path(sandbox: Sandbox) -> None:
    _fit(sandbox)
    moved = sandbox.root / "elsewhere"
    (sandbox.storage / "run").rename(moved)
    result = Result.from_path(moved)
    assert result.return_value == "learned"
    assert result.checkpoint is not None
    assert result.checkpoint.path == str(moved / "checkpoint_000001")


def test_artifacts_are_synced_on_request_without_touching_the_runs_own_files(sandbox: Sandbox) -> None:
    def function() -> None:
        Path("plots").mkdir()
        Path("plots", f"rank_{train.get_context().get_world_rank()}.txt").write_text("a plot")
        Path("result.json").write_text("not yours")

    for name, sync in (("with", True), ("without", False)):
        train.DataParallelTrainer(
            function,
            run_config=RunConfig(name=name, storage_path=sandbox.storage, sync_config=SyncConfig(sync_artifacts=sync)),
        ).fit()
    assert (sandbox.storage / "with" / "plots" / "rank_0.txt").read_text() == "a plot"
    assert not (sandbox.storage / "without" / "plots").exists()
    own = sandbox.storage / "with" / "result.json"
    assert not own.exists() or "not yours" not in own.read_text()


def _fit_with_artifacts(sandbox: Sandbox, function: Any, **sync: Any) -> Any:
    sync_config = SyncConfig(sync_artifacts=True, **sync)
    config = {"stored": str(sandbox.storage / "run" / "plot.txt")}
    return train.DataParallelTrainer(
        function,
        train_loop_config=config,
        run_config=RunConfig(name="run", storage_path=sandbox.storage, sync_config=sync_config),
    ).fit()


def test_artifacts_are_stored_every_sync_period(sandbox: Sandbox) -> None:
    def function(config: dict[str, str]) -> bool:
        Path("plot.txt").write_text("a plot")
        return _appears(Path(config["stored"]))

    assert _fit_with_artifacts(sandbox, function, sync_period=0.1).return_value


def test_artifacts_are_stored_with_checkpoints_unless_that_is_turned_off(sandbox: Sandbox) -> None:
    def function(config: dict[str, str]) -> bool:
        Path("plot.txt").write_text("a plot")
        save(1, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
        return _appears(Path(config["stored"]))

    def without(config: dict[str, str]) -> bool:
        Path("plot.txt").write_text("another plot")
        for value in (2, 3):
            save(value, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
        return Path(config["stored"]).read_text() == "a plot"

    assert _fit_with_artifacts(sandbox, function).return_value
    assert _fit_with_artifacts(sandbox, without, sync_artifacts_on_checkpoint=False).return_value
    assert (sandbox.storage / "run" / "plot.txt").read_text() == "another plot", "it is stored at the end all the same"


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.exists()


@pytest.mark.parametrize("verbose", [0, 1])
def test_verbose_0_shows_the_last_line_only(
    sandbox: Sandbox, verbose: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOLDFAST_QUIET")

    def function() -> None:
        train.report({"x": 1})

    def run() -> list[str]:
        config = RunConfig(name="run", storage_path=sandbox.storage, verbose=verbose)
        train.DataParallelTrainer(function, run_config=config).fit()
        return capfd.readouterr().err.splitlines()

    assert (len(run()) == 1) == (verbose == 0)
    assert len(run()) == verbose, "complete already"


def test_the_terminal_says_where_workers_run_and_keeps_their_streams(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOLDFAST_QUIET")

    def function() -> tuple[str, int]:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        train.report({"loss": 0.5})
        train.collective.barrier()
        return str(Path.cwd()), os.getpid()

    result = train.DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=sandbox.storage),
    ).fit()
    directory, pid = result.return_value
    out, err = capsys.readouterr()
    assert sorted(_by_rank(out.splitlines())) == [(0, "to stdout"), (1, "to stdout")]
    lines = err.splitlines()
    assert sorted(_by_rank(lines)) == [(0, "to stderr"), (1, "to stderr")]
    assert f"Workers run in the directory {directory}" in lines
    (started,) = [line for line in lines if line.startswith("Started on ")]
    assert f"rank 0 (pid {pid})" in started
    assert any(line.startswith("loss=0.5  (iteration 1 at ") for line in lines)


def _by_rank(lines: list[str]) -> list[tuple[int, str]]:
    """What each rank printed: ranks far apart in time are not shown as one."""
    found = [re.match(r"\(ranks? (\d)(?:-(\d))?\) (.*)", line) for line in lines]
    return [
        (rank, match[3]) for match in found if match for rank in range(int(match[1]), int(match[2] or match[1]) + 1)
    ]

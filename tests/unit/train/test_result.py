"""`Result` is read from the run's directory, with the attributes of Ray Train."""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.handle import Checkpoint
from holdfast.control.failures import run_error
from holdfast.control.view import RunView
from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.failure_kind import FailureKind
from holdfast.core.records import Preemption, Reported, RunFailed, WorkerFailure
from holdfast.errors import Damaged, OutOfSpace
from holdfast.journal.writer import Journal
from holdfast.storage.locate import open_store
from holdfast.train import (
    ControllerError,
    PreemptionError,
    PreemptionInfo,
    Result,
    TrainingFailedError,
    WorkerGroupError,
)


def view(**changes: Any) -> RunView:
    scores = {0: 0.5, 1: 0.9, 2: math.nan, 3: 0.7}
    fields: dict[str, Any] = {
        "metrics": {"loss": 0.25},
        "checkpoints": [
            StoredCheckpoint(
                name=f"checkpoint_{at:06d}",
                index=at,
                iteration=at + 1,
                generation=1,
                metrics={"val": {"acc": score}, "step": at},
            )
            for at, score in scores.items()
        ],
        "return_value": {"done": True},
        "params": {"train_loop_config": {"lr": 1}},
    }
    return RunView(**(fields | changes))


def result(tmp_path: Path, **changes: Any) -> Result:
    return Result._of_run(Checkpoint(tmp_path / "run"), view(**changes))


def indices(pairs: list[tuple[Checkpoint, dict[str, Any]]]) -> list[int]:
    return [metrics["step"] for _, metrics in pairs]


def test_the_last_report_and_the_newest_checkpoint(tmp_path: Path) -> None:
    found = result(tmp_path)
    assert found.metrics == {"loss": 0.25}
    assert found.checkpoint == Checkpoint(tmp_path / "run" / "checkpoint_000003")
    assert (found.path, found.filesystem.type_name) == (str(tmp_path / "run"), "local")
    assert (found.return_value, found.config, found.error) == (
        {"done": True},
        {"train_loop_config": {"lr": 1}},
        None,
    )


def test_an_empty_run_has_no_metrics_and_no_checkpoint(tmp_path: Path) -> None:
    found = result(tmp_path, metrics=None, checkpoints=[])
    assert (found.metrics, found.checkpoint, found.metrics_dataframe) == (None, None, None)
    assert found.best_checkpoints == []
    with pytest.raises(RuntimeError, match="No checkpoint exists"):
        found.get_best_checkpoint("loss", "min")


def test_the_data_frame_has_a_row_for_every_report(tmp_path: Path) -> None:
    rows = [
        Reported(at=5.0, generation=1, iteration=1, metrics={"a": {"b": 1}, "timestamp": "mine"}),
        Reported(at=6.0, generation=1, iteration=2, metrics={"loss": 0.5}),
    ]
    store = open_store(tmp_path / "run")
    store.put("run.json", b"{}")
    journal = Journal(store, 1, "0123456789abcdef")
    journal.append(rows)
    journal.flush()
    journal.close()
    frame = result(tmp_path).metrics_dataframe
    assert frame is not None
    assert list(frame.columns) == ["training_iteration", "timestamp", "a/b", "loss"]
    assert list(frame["training_iteration"]) == [1, 2]
    assert frame["timestamp"][0] == "mine"
    assert math.isnan(frame["a/b"][1])


def test_best_checkpoints_ascend_by_the_runs_own_score(tmp_path: Path) -> None:
    assert indices(result(tmp_path).best_checkpoints) == [0, 1, 2, 3]
    assert indices(result(tmp_path, score_attribute="val/acc").best_checkpoints) == [2, 0, 3, 1]
    lowest = result(tmp_path, score_attribute="val/acc", score_order="min")
    assert indices(lowest.best_checkpoints) == [2, 1, 3, 0]


def test_the_best_checkpoint_by_any_metric(tmp_path: Path) -> None:
    found = result(tmp_path)
    assert found.get_best_checkpoint("val/acc", "max").path.endswith("checkpoint_000001")
    assert found.get_best_checkpoint("val/acc", "min").path.endswith("checkpoint_000000")
    assert found.get_best_checkpoint("step", "max").path.endswith("checkpoint_000003")
    with pytest.raises(RuntimeError, match=r"Invalid metric name 'f1'! You may choose from: \['step', 'val/acc'\]"):
        found.get_best_checkpoint("f1", "max")
    with pytest.raises(RuntimeError, match=r"Invalid metric name 'val'!"):
        found.get_best_checkpoint("val", "max")
    with pytest.raises(ValueError, match="Unsupported mode: 'best'"):
        found.get_best_checkpoint("step", "best")  # type: ignore[arg-type]


class OwnError(Exception):
    """One whose message is not its argument."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")


class SilentError(Exception):
    """One that cannot be made from text."""

    def __str__(self) -> str:
        return f"{self.missing}"  # type: ignore[attr-defined]


def test_errors_come_back_with_their_class_where_it_is_imported(tmp_path: Path) -> None:
    failures = (
        WorkerFailure(
            rank=0, cause="raised", error_type="ValueError", error="bad batch", traceback="Traceback: line 3"
        ),
        WorkerFailure(rank=1, cause="raised", error_type="mylib.Oops", error="my own"),
        WorkerFailure(rank=2, cause="raised", error_type="UnicodeDecodeError", error="cannot be made from a message"),
        WorkerFailure(rank=3, cause="raised", error_type="open", error="a builtin that is no exception"),
        WorkerFailure(rank=4, cause="raised", error_type=f"{__name__}.OwnError", error="code 3: two\nlines"),
        WorkerFailure(rank=5, cause="raised", error_type="KeyError", error="'lr'"),
        WorkerFailure(rank=6, cause="raised", error_type="holdfast.errors.Damaged", error="a hash differs"),
        WorkerFailure(rank=7, cause="raised", error_type=f"{__name__}.SilentError", error="who knows"),
        WorkerFailure(rank=8, cause="raised", error_type="antigravity.Error", error="not imported here"),
    )
    ended = RunFailed(at=1.0, error="rank 0 raised ValueError: bad batch", failures=failures)
    error = result(tmp_path, error=run_error(ended, "/runs/x")).error
    assert isinstance(error, WorkerGroupError) and isinstance(error, TrainingFailedError)
    assert str(error) == (
        "Training failed: rank 0 raised ValueError: bad batch. Fix this, then the same call continues the run in "
        "/runs/x.\n\nTraceback: line 3"
    )
    assert isinstance(error.worker_failures[0], ValueError)
    assert error.worker_failures[0].__notes__ == ["Traceback: line 3"]
    assert str(error.worker_failures[1]) == "mylib.Oops: my own"
    assert [type(error.worker_failures[rank]) for rank in (1, 2, 3, 7, 8)] == [RuntimeError] * 5
    assert [type(error.worker_failures[rank]) for rank in (4, 5, 6)] == [OwnError, KeyError, Damaged]
    assert str(error.worker_failures[4]) == "code 3: two\nlines"
    assert error.worker_failures[5].args == ("lr",)
    assert str(error.worker_failures[7]) == f"{__name__}.SilentError: who knows"
    assert "antigravity" not in sys.modules, "a name in storage imports nothing"


def test_what_no_worker_is_to_blame_for_is_a_controller_error(tmp_path: Path) -> None:
    ended = RunFailed(at=1.0, error="the disk is full", error_type=FailureKind.OUT_OF_SPACE)
    error = run_error(ended, "/runs/x")
    assert isinstance(error, ControllerError) and isinstance(error.controller_failure, OutOfSpace)
    assert (str(error), error.worker_failures) == ("Training failed: OutOfSpace: the disk is full", {})


def test_one_preemption_too_many_is_an_error_of_its_own() -> None:
    last = Preemption(ranks={"b": (1, 3)}, deadline=30.5)
    error = run_error(RunFailed(at=1.0, error="nodes were taken away", preemption=last), "/runs/x")
    assert isinstance(error, PreemptionError)
    assert error.preemption_info == PreemptionInfo(30500, {"b": [1, 3]})


@pytest.mark.parametrize(
    "error",
    [
        WorkerGroupError("two\nlines", {1: ValueError("x")}),
        ControllerError(OutOfSpace("full")),
        PreemptionError(PreemptionInfo(None, {"node": [1, 0]}), True),
    ],
)
def test_errors_of_training_can_be_pickled(error: TrainingFailedError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), repr(vars(again))) == (type(error), str(error), repr(vars(error)))


def test_repr_of_a_result(tmp_path: Path) -> None:
    assert repr(result(tmp_path)) == (
        "Result(\n"
        "  metrics={'loss': 0.25},\n"
        f"  path='{tmp_path}/run',\n"
        "  filesystem='local',\n"
        f"  checkpoint=Checkpoint(filesystem=local, path={tmp_path}/run/checkpoint_000003)\n"
        ")"
    )


def test_a_run_on_a_filesystem_of_the_users_keeps_it(tmp_path: Path) -> None:
    import pyarrow.fs

    filesystem = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    found = Result._of_run(Checkpoint("bucket/run", filesystem), view())
    assert found.path == "bucket/run"
    assert found.filesystem is filesystem
    assert found.checkpoint is not None
    assert (found.checkpoint.path, found.checkpoint.filesystem) == ("bucket/run/checkpoint_000003", filesystem)


def test_a_path_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Experiment folder .*gone doesn't exist\."):
        Result.from_path(tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []


def test_the_best_checkpoints_are_as_many_as_are_kept(tmp_path: Path) -> None:
    best = result(tmp_path, score_attribute="val/acc", num_to_keep=2)
    assert indices(best.best_checkpoints) == [3, 1], "the newest, which is kept besides, is no good"
    assert indices(result(tmp_path, num_to_keep=3).best_checkpoints) == [1, 2, 3]


def test_a_result_can_be_made_by_hand(tmp_path: Path) -> None:
    pairs = [(Checkpoint(tmp_path / str(at)), {"loss": loss}) for at, loss in enumerate([0.5, 0.25, 0.75])]
    made = Result({"loss": 0.75}, pairs[-1][0], None, str(tmp_path), best_checkpoints=pairs, return_value=3)
    assert (made.metrics, made.checkpoint, made.path) == ({"loss": 0.75}, pairs[-1][0], str(tmp_path))
    assert (made.best_checkpoints, made.return_value, made.metrics_dataframe, made.config) == (pairs, 3, None, None)
    assert made.get_best_checkpoint("loss", "min") == pairs[1][0]
    assert Result(metrics=None, checkpoint=None, error=None, path="/x").best_checkpoints is None
    assert "metrics={'loss': 0.75}" in repr(made)

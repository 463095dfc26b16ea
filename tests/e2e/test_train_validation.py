"""Checkpoints are validated in a worker of its own while training goes on, also after the driver was stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import save, value_of
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.linux.resources import cpu_count
from holdfast.train import (
    Checkpoint,
    CheckpointConfig,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    ValidationTaskConfig,
)


def make(sandbox: Sandbox, function: Any, validation: ValidationConfig | None, **run: Any) -> train.DataParallelTrainer:
    """Training takes every CPU of the machine."""
    return train.DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": cpu_count()}),
        run_config=RunConfig(name="run", storage_path=sandbox.storage, **run),
        validation_config=validation,
    )


def test_the_metrics_of_a_validation_join_the_checkpoints_and_count_for_retention(sandbox: Sandbox) -> None:
    def score(checkpoint: Checkpoint, factor: int = 0, trouble: str = "") -> dict[str, Any]:
        if trouble:
            raise ValueError(trouble)
        return {"score": factor * value_of(checkpoint), "pid": os.getpid()}

    def function() -> list[Any]:
        save(1, validation=ValidationTaskConfig(fn_kwargs={"factor": -1}))
        save(2, validation=True)
        save(3, validation=ValidationTaskConfig(fn_kwargs={"trouble": "cannot be scored"}))
        save(4)
        found = train.get_all_reported_checkpoints()
        assert os.getpid() not in [one.metrics.get("pid") for one in found]
        return [[one.metrics["value"], one.metrics.get("score"), one.status.value] for one in found]

    keep = CheckpointConfig(num_to_keep=4, checkpoint_score_attribute="score")
    default = ValidationTaskConfig(fn_kwargs={"factor": 10})
    result = make(sandbox, function, ValidationConfig(score, default), checkpoint_config=keep).fit()
    assert result.return_value == [
        [1, -1, "VALIDATED"],
        [2, 20, "VALIDATED"],
        [3, None, "VALIDATION_FAILED"],
        [4, None, "COMMITTED"],
    ]
    assert value_of(result.get_best_checkpoint("score", "max")) == 2
    assert value_of(result.best_checkpoints[-1][0]) == 2
    assert result.best_checkpoints[-1][1]["score"] == 20


def test_a_validation_that_was_not_finished_is_run_by_the_next_driver(sandbox: Sandbox) -> None:
    """The first run fails while its validation is under way."""
    began, may_end = sandbox.root / "began", sandbox.root / "may-end"

    def score(checkpoint: Checkpoint) -> dict[str, Any]:
        print("begins")  # so that it has a log file
        began.touch()
        while not may_end.exists():
            time.sleep(0.005)
        return {"score": value_of(checkpoint)}

    def function() -> None:
        if train.get_checkpoint() is None:
            save(7, validation=True)
            while not began.exists():
                time.sleep(0.005)
            raise RuntimeError("on purpose")

    trainer = make(sandbox, function, ValidationConfig(score))
    with pytest.raises(train.TrainingFailedError, match="on purpose"):
        trainer.fit()
    may_end.touch()
    result = trainer.fit()
    assert [metrics["score"] for _, metrics in result.best_checkpoints] == [7]
    logs = sorted(path.name for path in Path(result.path).glob("logs/generation_*") if len(path.name) > 17)
    assert logs == ["generation_1000001", "generation_2000001"]


def test_a_validation_that_takes_too_long_is_stopped(sandbox: Sandbox) -> None:
    def score(checkpoint: Checkpoint) -> dict[str, Any]:
        signal.pause()
        return {}

    def function() -> str:
        save(1, validation=True)
        (found,) = train.get_all_reported_checkpoints()
        return found.status.value

    config = ValidationConfig(score, ValidationTaskConfig(timeout_s=0.5))
    assert make(sandbox, function, config).fit().return_value == "VALIDATION_TIMEOUT"


def test_validation_needs_a_function_and_a_checkpoint(sandbox: Sandbox) -> None:
    def function() -> None:
        with pytest.raises(ValueError, match="needs a checkpoint"):
            train.report({}, validation=True)
        Path("mine").mkdir()
        with pytest.raises(ValueError, match=r"the trainer was given no function .*validation_config=ValidationConfig"):
            train.report({}, Checkpoint.from_directory("mine"), validation=True)

    make(sandbox, function, None).fit()
    with pytest.raises(ValueError, match=r"ValidationTaskConfig\(timeout_s\) must be above 0"):
        ValidationTaskConfig(timeout_s=0)
    with pytest.raises(ValueError, match="validation_config must be a ValidationConfig, not function"):
        make(sandbox, function, function)  # type: ignore[arg-type]

"""Helpers of the end-to-end tests: a small trainer on a test's own storage, and checkpoints of one number."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.train import Checkpoint, Result, RunConfig, ScalingConfig

__all__ = ["Function", "fit", "make_trainer", "save", "value_of"]

Function = Callable[..., Any]


def make_trainer(
    sandbox: Sandbox, function: Function, workers: int = 1, config: dict[str, Any] | None = None, **run: Any
) -> train.DataParallelTrainer:
    run = {"name": "run", "storage_path": sandbox.storage, **run}
    return train.DataParallelTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(**run),
    )


def fit(sandbox: Sandbox, function: Function, workers: int = 1, **run: Any) -> Result:
    return make_trainer(sandbox, function, workers, **run).fit()


def save(value: int, **options: Any) -> None:
    """Report a checkpoint that holds a number."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "value.json").write_text(json.dumps(value))
        train.report({"value": value}, checkpoint=Checkpoint.from_directory(directory), **options)


def value_of(checkpoint: Checkpoint) -> int:
    with checkpoint.as_directory() as directory:
        return int(json.loads(Path(directory, "value.json").read_text()))

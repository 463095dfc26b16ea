"""One scenario of `bench.train` on Holdfast or on Ray Train: `python trainer.py SCENARIO DIRECTORY holdfast|ray`.

The script is the same for both: that is what "the names of Ray Train" means.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: F401  as every training script does, and the other contenders' do
from bench.workload import Log, train_steps

SCENARIO, DIRECTORY, SYSTEM = sys.argv[1:4]
train: Any = importlib.import_module(f"{SYSTEM}.train")
train_torch: Any = importlib.import_module(f"{SYSTEM}.train.torch")
_AT_MOST_S = 10.0


def noop() -> None:
    Log(f"{DIRECTORY}/log").say("line")


def reports() -> None:
    log, began, count = Log(f"{DIRECTORY}/log"), time.perf_counter(), 0
    while count < 20_000 and time.perf_counter() - began < _AT_MOST_S:
        train.report({"step": count, "loss": 0.5})
        count += 1
    log.say("reports", rate=count / (time.perf_counter() - began))


def checkpoints() -> None:
    log, began, count = Log(f"{DIRECTORY}/log"), time.perf_counter(), 0
    while count < 500 and time.perf_counter() - began < _AT_MOST_S:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "data").write_bytes(bytes(1024))
            train.report({"step": count}, checkpoint=train.Checkpoint.from_directory(directory))
        count += 1
    log.say("reports", rate=count / (time.perf_counter() - began))


def steps() -> None:
    rank = train.get_context().get_world_rank()
    with contextlib.ExitStack() as stack:

        def load() -> Path | None:
            checkpoint = train.get_checkpoint()
            return None if checkpoint is None else Path(stack.enter_context(checkpoint.as_directory()))

        def save(step: int, write: Callable[[Path], None]) -> None:
            with tempfile.TemporaryDirectory() as directory:
                checkpoint = None
                if rank == 0:
                    write(Path(directory))
                    checkpoint = train.Checkpoint.from_directory(directory)
                train.report({"step": step}, checkpoint=checkpoint)

        train_steps(Log(f"{DIRECTORY}/log"), rank, 100_000, load, save)


if SYSTEM == "ray" or "RAY_ADDRESS" in os.environ:
    own = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": 2, "include_dashboard": False}
    importlib.import_module("ray").init(**own, log_to_driver=False, logging_level="ERROR")
functions = {"noop": noop, "reports": reports, "checkpoints": checkpoints, "steps": steps}
trainer = train_torch.TorchTrainer(
    functions[SCENARIO],
    scaling_config=train.ScalingConfig(
        num_workers=1 if SCENARIO == "checkpoints" else (1, 2) if "BENCH_ELASTIC" in os.environ else 2,
        placement_strategy="SPREAD" if "RAY_ADDRESS" in os.environ else "PACK",
        **({"spares": 1} if "BENCH_SPARE" in os.environ and SYSTEM == "holdfast" else {}),
    ),
    run_config=train.RunConfig(
        name=SCENARIO,
        storage_path=f"{DIRECTORY}/storage",
        failure_config=train.FailureConfig(max_failures=-1),
        checkpoint_config=train.CheckpointConfig(num_to_keep=2),
    ),
)
Log(f"{DIRECTORY}/log").say("fit")
trainer.fit()

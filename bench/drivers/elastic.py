"""Elastic training of `bench.elastic`: `python elastic.py holdfast|ray|torchrun DIRECTORY LOW HIGH STATE_BYTES STEP_S`.

The loop is the same for all. Checkpoints are taken when the system asks for one, where it can ask, and every twentieth
step. Each step is a line in DIRECTORY/log; a worker that restarts goes on from the step of its checkpoint.
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

import torch
import torch.distributed as dist
from bench.drivers.one_file import load as load_file
from bench.drivers.one_file import save as save_file
from bench.workload import Log

SYSTEM, DIRECTORY = sys.argv[1], sys.argv[2]
LOW, HIGH, STATE_BYTES = map(int, sys.argv[3:6])
STEP_S = float(sys.argv[6])
_EVERY = 20

Save = Callable[[int, Callable[[Path], None]], None]


def steps(rank: int, world_size: int, found: Path | None, is_due: Callable[[int], bool], save: Save) -> None:
    """Train for ever, with an allreduce a step."""
    log = Log(f"{DIRECTORY}/log")
    state = torch.zeros(STATE_BYTES // 4)
    first = 0
    if found is not None:
        saved = torch.load(found / "state.pt")
        state, first = saved["state"], saved["step"] + 1

    def write(directory: Path) -> None:
        torch.save({"state": state, "step": step}, directory / "state.pt")

    for step in range(first, 1_000_000):
        ones = torch.ones(8)
        dist.all_reduce(ones)
        log.say("step", rank=rank, step=step, world=world_size)
        if is_due(step):
            log.say("saving", rank=rank, step=step)
            save(step, write)
        time.sleep(STEP_S)


def with_torchrun() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps(
        rank,
        dist.get_world_size(),
        load_file(DIRECTORY),
        lambda step: step % _EVERY == 0,
        lambda _, write: save_file(DIRECTORY, rank, write),
    )


def with_trainer() -> None:
    train: Any = importlib.import_module(f"{SYSTEM}.train")
    train_torch: Any = importlib.import_module(f"{SYSTEM}.train.torch")

    def function() -> None:
        context = train.get_context()
        rank = context.get_world_rank()

        def is_due(step: int) -> bool:
            return step % _EVERY == 0 or (SYSTEM == "holdfast" and train.should_checkpoint())

        def save(step: int, write: Callable[[Path], None]) -> None:
            with tempfile.TemporaryDirectory() as directory:
                checkpoint = None
                if rank == 0:
                    write(Path(directory))
                    checkpoint = train.Checkpoint.from_directory(directory)
                train.report({"step": step}, checkpoint=checkpoint)

        with contextlib.ExitStack() as stack:
            found = train.get_checkpoint()
            path = None if found is None else Path(stack.enter_context(found.as_directory()))
            steps(rank, context.get_world_size(), path, is_due, save)

    if SYSTEM == "ray":
        scaling = train.ScalingConfig(num_workers=(LOW, HIGH), elastic_resize_monitor_interval_s=_SETTLING_S)
        importlib.import_module("ray").init(log_to_driver=False, logging_level="ERROR")
    else:
        scaling = train.ScalingConfig(
            num_workers=(LOW, HIGH),
            engine="join",
            listen=os.environ["BENCH_LISTEN"],
            elastic_resize_monitor_interval_s=_SETTLING_S,
            last_call_timeout=_SETTLING_S,
        )
    train_torch.TorchTrainer(
        function,
        scaling_config=scaling,
        run_config=train.RunConfig(
            name="run",
            storage_path=f"{DIRECTORY}/storage",
            failure_config=train.FailureConfig(max_failures=-1),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


_SETTLING_S = float(os.environ.get("BENCH_SETTLING_S", "1"))

if SYSTEM == "torchrun":
    with_torchrun()
else:
    with_trainer()

"""A driver for tests with several hosts: `python -m tests.hosts.driver OPTIONS`, with options in JSON.

Prints what `fit()` returned as its last line, in JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults.programs.processes import write_whole

from holdfast import train
from holdfast.train import Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig


def allreduce(config: dict[str, Any]) -> dict[str, Any]:
    """Train a model with DDP for some steps; rank 0 tells what it found around it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(3):
        model(torch.full((2, 4), float(dist.get_rank() + 1))).sum().backward()
        train.report({"step": step})
    gradient = next(iter(model.parameters())).grad
    assert gradient is not None
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        places, [os.environ["TEST_HOST"], os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]]
    )
    return {"gradient": gradient[0, 0].item(), "places": places, "master": os.environ["MASTER_ADDR"]}


def work(config: dict[str, Any]) -> dict[str, Any]:
    """Report steps until a file is there; every rank tells in a file of its own that it has started."""
    rank = train.get_context().get_world_rank()
    with Path(config["directory"], f"started_{rank}").open("a") as file:
        file.write(f"{os.environ['TEST_HOST']}\n")
    step = 0
    while not Path(config["directory"], "end").exists():
        step += 1
        train.report({"step": step})
        write_whole(Path(config["directory"], f"step_{rank}"), str(step))
        time.sleep(0.05)
    return {"steps": step}


def checkpoint(config: dict[str, Any]) -> dict[str, Any]:
    """Report checkpoints of all ranks until a file is there; tell from which step each rank started."""
    rank = train.get_context().get_world_rank()
    step = 0
    found = train.get_checkpoint()
    if found is not None:
        with found.as_directory() as directory:
            step = int(Path(directory, f"step_{rank}").read_text())
            assert Path(directory, f"large_{rank}").read_bytes() == _large(step, rank)
    with Path(config["directory"], f"started_{rank}").open("a") as file:
        file.write(f"{os.environ['TEST_HOST']} {step}\n")
    while not train.collective.broadcast_from_rank_zero(Path(config["directory"], "end").exists()):
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"step_{rank}").write_text(str(step))
            Path(directory, f"large_{rank}").write_bytes(_large(step, rank))
            train.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))
        write_whole(Path(config["directory"], f"step_{rank}"), str(step))
    return {"steps": step}


def state(config: dict[str, Any]) -> float:
    """Rank 0 reports a state, and all ranks wait to be killed; those that start from it tell what they found."""
    import numpy

    rank = train.get_context().get_world_rank()
    found = train.get_checkpoint()
    if found is not None:
        total = float(found.load_state()["weights"].sum())
        Path(config["directory"], f"restored_{rank}").write_text(f"{os.environ['TEST_HOST']} {total}")
        return total
    if rank == 0:
        made = Checkpoint.from_state({"weights": numpy.full(3_000_000, 7.0)})
        train.report({}, checkpoint=made, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
    else:
        train.report({})
    write_whole(Path(config["directory"], f"on_{os.environ['TEST_HOST']}"), str(rank))
    while True:
        time.sleep(60)


def _large(step: int, rank: int) -> bytes:
    return bytes([step % 251, rank]) * 1_500_000


def main() -> None:
    options = json.loads(sys.argv[1])
    kind: type[DataParallelTrainer] = DataParallelTrainer
    functions = dict(globals())
    if options["function"] in ("allreduce", "learn"):
        from tests.hosts.learning import learn

        functions["learn"] = learn
        from holdfast.train.torch import TorchTrainer

        kind = TorchTrainer
    trainer = kind(
        functions[options["function"]],
        train_loop_config=options.get("config", {}),
        scaling_config=ScalingConfig(**options["scaling"]),
        run_config=RunConfig(
            name="run",
            storage_path=options["storage"],
            failure_config=FailureConfig(max_failures=options.get("max_failures", 0)),
            **options.get("run", {}),
        ),
    )
    result = trainer.fit()
    print(json.dumps({"value": result.return_value, "failures": result.metrics}), flush=True)


if __name__ == "__main__":
    main()

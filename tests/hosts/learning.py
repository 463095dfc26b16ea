"""What is trained in tests with hosts that come and go: a linear model in float64 on samples that are told apart.

The state has, besides the weights, which samples each step consumed and in how many workers, gathered from all ranks:
`learning_check` compares them with an undisturbed run. `learning_script` is for `holdfast launch`.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from holdfast import train
from holdfast.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer, prepare_data_loader

SAMPLES, BATCH, FEATURES = 37, 5, 4096
"""The last batch of an epoch has two samples: of three workers one has none."""
_RATE = 0.05


@cache
def make_samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator) / FEATURES**0.5
    return inputs, inputs.sum(1) + torch.randn(SAMPLES, dtype=torch.float64, generator=generator)


def share_of_gradient(weights: torch.Tensor, ids: torch.Tensor, weight: float) -> torch.Tensor:
    """What a rank adds to the mean over all ranks; nothing if it has no samples."""
    if not weight:
        return torch.zeros_like(weights)
    inputs, targets = make_samples()
    inputs, targets = inputs[ids], targets[ids]
    return inputs.T @ (inputs @ weights - targets) * (2 * weight / len(ids))


def descend(weights: torch.Tensor, gradients: torch.Tensor, workers: int) -> torch.Tensor:
    return weights - _RATE * (gradients / workers)


def learn(config: dict[str, Any]) -> dict[str, Any]:
    """Train until the file `end` is there, or for so many steps, with a checkpoint each `every` steps and when one is
    due."""
    workers = train.get_context().get_world_size()
    state: dict[str, Any] = {
        "weights": torch.zeros(FEATURES, dtype=torch.float64),
        "ids": torch.zeros(0, BATCH, dtype=torch.int64),
        "workers": torch.zeros(0, dtype=torch.int64),
        "epoch": 0,
    }
    if (checkpoint := train.get_checkpoint()) is not None:
        state = checkpoint.load_state()
    ballast = torch.zeros(int(config.get("ballast_bytes", 0)), dtype=torch.uint8)
    loader = prepare_data_loader(
        DataLoader(TensorDataset(torch.arange(SAMPLES)), shuffle=True), elastic=True, global_batch_size=BATCH
    )
    while True:
        loader.set_epoch(state["epoch"])
        for (batch,) in loader:
            mine = batch if loader.loss_weight else batch[:0]
            gradient = share_of_gradient(state["weights"], mine, loader.loss_weight)
            ids, is_over = _exchange(mine, gradient, Path(config["directory"], "end").exists())
            step = len(state["ids"]) + 1
            state["weights"] = descend(state["weights"], gradient, workers)
            state["ids"] = torch.cat([state["ids"], ids[None]])
            state["workers"] = torch.cat([state["workers"], torch.tensor([workers])])
            is_over = is_over or step == config.get("steps")
            is_due = train.should_checkpoint() or is_over or step % int(config.get("every", 10)) == 0
            ballast.fill_(step % 251)
            train.report(
                {"step": step, "workers": workers, "at": time.time()},
                checkpoint=Checkpoint.from_state({**state, "ballast": ballast}) if is_due else None,
            )
            if is_over:
                return {"step": step}
            time.sleep(float(config.get("step_s", 0.05)))
        state["epoch"] += 1


def _exchange(mine: torch.Tensor, gradient: torch.Tensor, is_over: bool) -> tuple[torch.Tensor, bool]:
    """All ranks' samples of this step, in order of ranks, and whether rank 0 says that it is the last; `gradient`
    becomes the sum."""
    message = torch.full((BATCH + 1,), -1)
    message[0] = int(is_over)
    message[1 : 1 + len(mine)] = mine
    every = [message]
    if dist.is_initialized():
        every = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        dist.all_gather(every, message)
        dist.all_reduce(gradient)
    ids = torch.cat([one[1:][one[1:] >= 0] for one in every])
    found = torch.full((BATCH,), -1)
    found[: len(ids)] = ids
    return found, bool(every[0][0])


def make_trainer(directory: Path, storage: Path, scaling: ScalingConfig, **config: Any) -> TorchTrainer:
    return TorchTrainer(
        learn,
        train_loop_config={"directory": str(directory), **config},
        scaling_config=scaling,
        run_config=RunConfig(
            name="run", storage_path=storage, failure_config=FailureConfig(max_failures=-1), verbose=0
        ),
    )

"""Train a small network on images that it makes up, on as many hosts as there are; README.md has the commands.

    holdfast launch --rdzv 'etcd://etcd:2379/images?min_workers=1&max_workers=3' examples/launch/images.py --storage s3://...

Every sample is consumed once an epoch, whatever joins or dies; the global batch stays the same.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import train
from holdfast.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def make_images(count: int) -> TensorDataset:
    """Noise with a bright square in one of four corners, which is to be found."""
    torch.manual_seed(7)
    images, corners = torch.randn(count, 1, 16, 16), torch.arange(count) % 4
    for image, corner in zip(images, corners.tolist(), strict=True):
        row, column = divmod(corner, 2)
        image[0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1.0
    return TensorDataset(images, corners)


def train_images(config: dict[str, Any]) -> float:
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    first_epoch, step, loss = 0, 0, torch.zeros(())
    if (checkpoint := train.get_checkpoint()) is not None:
        state = checkpoint.load_state()
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, step = state["epoch"], state["step"]
    model = prepare_model(network)  # DDP, unless there is one worker: so it is the bare network that is saved
    loader = prepare_data_loader(
        DataLoader(make_images(config["samples"]), shuffle=True), elastic=True, global_batch_size=config["batch"]
    )
    for epoch in range(first_epoch, config["epochs"]):
        loader.set_epoch(epoch)
        for images, corners in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), corners) * loader.loss_weight
            loss.backward()
            optimizer.step()
            step += 1
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
            world = train.get_context().get_world_size()
            is_due = train.should_checkpoint()
            train.report(
                {"epoch": epoch, "step": step, "loss": loss.item(), "world": world},
                checkpoint=Checkpoint.from_state(state) if is_due else None,
            )
            time.sleep(config["pause_s"])
    return float(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--name", default="images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--pause-s", type=float, default=0.0, help="after each step, so that there is time to kill a host"
    )
    given = parser.parse_args()
    trainer = TorchTrainer(
        train_images,
        train_loop_config={
            "epochs": given.epochs,
            "samples": given.samples,
            "batch": given.batch,
            "pause_s": given.pause_s,
        },
        scaling_config=ScalingConfig(num_workers=(1, 3), elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(
            name=given.name, storage_path=given.storage, failure_config=FailureConfig(max_failures=-1)
        ),
    )
    result = trainer.fit()
    print(f"RESULT {result.metrics}", flush=True)


if __name__ == "__main__":
    main()

"""Fine-tune a small ResNet on generated images of two classes, as a Ray job on KubeRay; README.md has the steps.

    python fine-tune-pytorch-resnet-image-classifier.py                        # train, or go on where it was
    python fine-tune-pytorch-resnet-image-classifier.py --pretrain resnet.pt   # make the weights that it begins with

NUM_WORKERS and USE_GPU are read from the environment, as the manifest sets them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from holdfast import train
from holdfast.train import Checkpoint, CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model, unwrap_model

STORAGE_PATH = "/mnt/cluster_storage"
NAME = "finetune-resnet"
WEIGHTS = f"{STORAGE_PATH}/weights/resnet.pt"
PRETRAINED_CLASSES = 4

train_loop_config = {
    "input_size": 64,  # images are input_size x input_size
    "batch_size": 32,  # of each worker
    "num_epochs": 10,
    "lr": 0.01,
    "momentum": 0.9,
    "weights": WEIGHTS,
}


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Three stages of two blocks, and a classifier `fc`, named as in torchvision's models."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1))
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(y.mean(dim=(2, 3)))


def make_images(count: int, classes: int, size: int, seed: int) -> TensorDataset:
    """Stripes under noise; the class is their direction."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    angles = labels * (torch.pi / classes)
    across = torch.linspace(0, 8 * torch.pi, size)
    phases = torch.rand(count, 1, 1, generator=generator) * 2 * torch.pi
    x, y = across[None, None, :], across[None, :, None]
    stripes = torch.sin(x * angles.cos()[:, None, None] + y * angles.sin()[:, None, None] + phases)
    return TensorDataset(stripes[:, None] + torch.randn(count, 3, size, size, generator=generator), labels)


def build_datasets(input_size: int) -> dict[str, TensorDataset]:
    return {"train": make_images(244, 2, input_size, seed=1), "val": make_images(153, 2, input_size, seed=2)}


def initialize_model(weights: str | None) -> nn.Module:
    """The pretrained network with a new classifier for two classes; without `weights` they come from a checkpoint."""
    model = ResNet(PRETRAINED_CLASSES)
    if weights is not None:
        model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    model.fc = nn.Linear(model.fc.in_features, 2)
    return model


def evaluate(logits: torch.Tensor, labels: torch.Tensor) -> int:
    return int((logits.argmax(dim=1) == labels).sum().item())


def train_loop_per_worker(configs: dict[str, Any]) -> None:
    datasets = build_datasets(configs["input_size"])
    dataloaders = {
        phase: prepare_data_loader(DataLoader(dataset, batch_size=configs["batch_size"], shuffle=phase == "train"))
        for phase, dataset in datasets.items()
    }
    device = get_device()
    context = train.get_context()

    start_epoch = 0
    checkpoint = train.get_checkpoint()
    model = initialize_model(None if checkpoint else configs["weights"])
    optimizer_state = None
    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            state = torch.load(Path(checkpoint_dir) / "checkpoint.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer_state = state["optimizer_state_dict"]
        start_epoch = state["epoch"] + 1
        if context.get_world_rank() == 0:
            print(f"Restored {checkpoint}: {configs['num_epochs'] - start_epoch} iterations left", flush=True)
    model = prepare_model(model)
    optimizer = optim.SGD(model.parameters(), lr=configs["lr"], momentum=configs["momentum"])
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(start_epoch, configs["num_epochs"]):
        metrics = {}
        for phase, dataloader in dataloaders.items():
            model.train(phase == "train")
            if context.get_world_size() > 1:
                dataloader.sampler.set_epoch(epoch)
            running_loss, running_corrects, seen = 0.0, 0, 0
            for inputs, labels in dataloader:
                inputs, labels = inputs.to(device), labels.to(device)
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    loss = criterion(outputs, labels)
                if phase == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                running_loss += loss.item() * len(labels)
                running_corrects += evaluate(outputs, labels)
                seen += len(labels)
            metrics = {"epoch": epoch, "loss": running_loss / seen, "acc": running_corrects / seen}
            if context.get_world_rank() == 0:
                print(f"Epoch {epoch}-{phase} Loss: {metrics['loss']:.4f} Acc: {metrics['acc']:.4f}", flush=True)
        with TemporaryDirectory() as tmpdir:
            checkpoint = None
            if context.get_world_rank() == 0:  # the model is the same on every rank
                state = {
                    "epoch": epoch,
                    "model": unwrap_model(model).state_dict(),
                    "optimizer_state_dict": optimizer.state_dict(),
                }
                torch.save(state, Path(tmpdir) / "checkpoint.pt")
                checkpoint = Checkpoint.from_directory(tmpdir)
            train.report(metrics, checkpoint=checkpoint)


def pretrain(path: Path) -> None:
    """Train the network for a few epochs to tell four directions apart, and write its weights."""
    torch.manual_seed(0)
    model = ResNet(PRETRAINED_CLASSES)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images = make_images(256, PRETRAINED_CLASSES, train_loop_config["input_size"], seed=0)
    for _ in range(3):
        for inputs, labels in DataLoader(images, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    torch.save(model.state_dict(), path)


def iterations_left(experiment_path: str) -> int:
    """How many are to be trained after the newest committed checkpoint."""
    num_epochs: int = train_loop_config["num_epochs"]
    if not TorchTrainer.can_restore(experiment_path):
        return num_epochs
    result = Result.from_path(experiment_path)
    committed = [metrics["epoch"] for _, metrics in result.best_checkpoints or []]
    return num_epochs - 1 - max(committed, default=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrain", type=Path, metavar="PATH", help="write pretrained weights there, and end")
    given = parser.parse_args()
    if given.pretrain is not None:
        pretrain(given.pretrain)
        return

    left = iterations_left(f"{STORAGE_PATH}/{NAME}")
    print(f"{NAME} in {STORAGE_PATH}: {left} iterations left", flush=True)
    if left == train_loop_config["num_epochs"] and not Path(WEIGHTS).exists():
        parser.error(f"no weights at {WEIGHTS}: make them with --pretrain, and copy them there")

    use_gpu = os.environ.get("USE_GPU", "1") == "1"
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=train_loop_config,
        scaling_config=ScalingConfig(
            num_workers=int(os.environ.get("NUM_WORKERS", "4")),
            use_gpu=use_gpu,
            resources_per_worker={"CPU": 1, "GPU": 1} if use_gpu else {"CPU": 1},
        ),
        run_config=RunConfig(
            name=NAME,
            storage_path=STORAGE_PATH,
            checkpoint_config=CheckpointConfig(num_to_keep=3),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit())


if __name__ == "__main__":
    main()

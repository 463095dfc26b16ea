"""Train a small model on two workers, kill one of them on purpose, and watch the run go on.

    python examples/demo.py

The second half of this file is an ordinary training script; the first half only does the killing.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast import train
from holdfast.train.torch import TorchTrainer, prepare_model

EPOCHS = 12
KILL_AFTER = 6


class Killer(train.UserCallback):
    """Sends SIGKILL to the worker of rank 1 once, after some epochs: as a spot machine would go away."""

    def __init__(self, pid_file: Path) -> None:
        self._pid_file = pid_file
        self._done = False

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        if metrics[0]["epoch"] >= KILL_AFTER and not self._done:
            self._done = True
            pid = int(self._pid_file.read_text())
            print(f"\n>>> kill -9 {pid}    (the worker of rank 1)\n", flush=True)
            os.kill(pid, signal.SIGKILL)


def train_loop(config: dict[str, Any]) -> float:
    context = train.get_context()
    if context.get_world_rank() == 1:
        Path(config["pid_file"]).write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    first_epoch = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "checkpoint.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    target = torch.linspace(-1, 1, 32)
    loss = torch.zeros(())
    for epoch in range(first_epoch, EPOCHS):
        generator = torch.Generator().manual_seed(1000 * epoch + context.get_world_rank())
        for _ in range(100):
            inputs = torch.randn(256, 32, generator=generator)
            loss = nn.functional.mse_loss(model(inputs).squeeze(1), inputs @ target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if context.get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(directory, "checkpoint.pt"))
                checkpoint = train.Checkpoint.from_directory(directory)
            train.report({"epoch": epoch + 1, "loss": loss.item()}, checkpoint=checkpoint)
    return float(loss.item())


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as storage:
        pid_file = Path(storage, "pid")
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"pid_file": str(pid_file)},
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(
                name="demo",
                storage_path=storage,
                failure_config=train.FailureConfig(max_failures=3),
                checkpoint_config=train.CheckpointConfig(num_to_keep=2),
                callbacks=[Killer(pid_file)],
            ),
        )
        result = trainer.fit()
        assert result.metrics is not None
        print(f"All {EPOCHS} epochs are done; final loss {result.metrics['loss']:.5f}.")


if __name__ == "__main__":
    main()

"""A training script that survives its driver: run the same command again, and it goes on where it was.

    python examples/entrypoint.py --storage_path ~/runs --run_name mnist-1

By hand, by systemd (`Restart=on-failure`), by a Kubernetes Job (`restartPolicy: OnFailure`): whatever starts it again
with the same `--storage_path` and `--run_name` continues the run, and returns its result at once when it is complete.
Ctrl+C ends it with exit code 130 and SIGTERM with 143.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from holdfast import train
from holdfast.train.torch import TorchTrainer, prepare_model, unwrap_model


def train_loop(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first_epoch = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        state = checkpoint.load_state()
        unwrap_model(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    rank = train.get_context().get_world_rank()
    print(f"rank {rank} starts with epoch {first_epoch}", flush=True)
    for epoch in range(first_epoch, config["epochs"]):
        generator = torch.Generator().manual_seed(1000 * epoch + rank)  # the same data, however often it is resumed
        inputs = torch.randn(64, 8, generator=generator)
        loss = nn.functional.mse_loss(model(inputs).squeeze(1), inputs.sum(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoint = None
        if rank == 0:
            state = {
                "model": unwrap_model(model).state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            checkpoint = train.Checkpoint.from_state(state)
        train.report({"epoch": epoch, "loss": loss.item()}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--storage_path", required=True, help="directory or URI that holds the run's own directory")
    parser.add_argument("--run_name", required=True, help="the same name continues the same run")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": given.epochs},
        scaling_config=train.ScalingConfig(num_workers=given.num_workers),
        run_config=train.RunConfig(
            name=given.run_name,
            storage_path=given.storage_path,
            failure_config=train.FailureConfig(max_failures=-1),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"finished: {result.metrics}")


if __name__ == "__main__":
    main()

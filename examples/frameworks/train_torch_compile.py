"""`torch.compile` on several workers: a restarted worker finds the compiled code in torch's cache on disk.

python examples/frameworks/train_torch_compile.py --storage_path ~/holdfast_results --run_name torch_compile
"""

import argparse

import torch

from holdfast import train
from holdfast.train.torch import TorchTrainer, prepare_model


def train_func(config):
    context = train.get_context()
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    model = torch.compile(prepare_model(inner))
    optimizer = torch.optim.Adam(inner.parameters(), lr=0.01)

    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        state = checkpoint.load_state()
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        order = torch.Generator().manual_seed(epoch)
        for _ in range(config["steps"]):
            inputs = torch.randn(32, 8, generator=order)[context.get_world_rank() :: context.get_world_size()]
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        own = None
        if context.get_world_rank() == 0:
            state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            own = train.Checkpoint.from_state(state)
        train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=own)
    return sum(parameter.abs().sum().item() for parameter in inner.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage_path")
    parser.add_argument("--run_name", default="train_torch_compile")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": args.epochs, "steps": 20},
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
        run_config=train.RunConfig(
            name=args.run_name,
            storage_path=args.storage_path,
            failure_config=train.FailureConfig(max_failures=3),
        ),
    ).fit()
    print("loss", result.metrics["loss"])


if __name__ == "__main__":
    main()

"""FSDP2 (`fully_shard`) on several workers: each has a part of the parameters, and saves only that.

`Checkpoint.from_state` takes the shards as they are; a run that is restarted with another number of workers loads them
all the same.

    python examples/frameworks/train_fsdp2.py --storage_path ~/holdfast_results --run_name fsdp2
"""

import argparse

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast import train
from holdfast.train.torch import TorchTrainer


def train_func(config):
    context = train.get_context()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    mesh = init_device_mesh("cpu", (context.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "epoch": 0}
        state = checkpoint.load_state(into=state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start = state["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        order = torch.Generator().manual_seed(epoch)
        for _ in range(config["steps"]):
            inputs = torch.randn(32, 8, generator=order)[context.get_world_rank() :: context.get_world_size()]
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "epoch": epoch}
        train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=train.Checkpoint.from_state(state))
    return sum(parameter.full_tensor().abs().sum().item() for parameter in model.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage_path")
    parser.add_argument("--run_name", default="train_fsdp2")
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

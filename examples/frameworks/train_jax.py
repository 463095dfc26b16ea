"""JAX on several workers: the batch is spread over the devices of all of them, the parameters are on each.

python examples/frameworks/train_jax.py --storage_path ~/holdfast_results --run_name jax
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from holdfast import train
from holdfast.train.jax import JaxTrainer

BATCH = 64


def loss_of(params, inputs, wanted):
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - wanted) ** 2)


@jax.jit
def step(params, inputs, wanted):
    loss, gradients = jax.value_and_grad(loss_of)(params, inputs, wanted)
    return jax.tree.map(lambda param, gradient: param - 0.1 * gradient, params, gradients), loss


def train_func(config):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    spread, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(8, 32)) * 0.3, "b1": np.zeros(32), "w2": rng.normal(size=(32, 1)) * 0.3}
    params = {name: value.astype(np.float32) for name, value in params.items()}
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        state = checkpoint.load_state()
        params, start = state["params"], state["epoch"] + 1
    params = jax.tree.map(lambda value: jax.device_put(value, replicated), params)

    for epoch in range(start, config["epochs"]):
        order = np.random.default_rng(epoch)  # the same on every worker, whenever the run is restarted
        for _ in range(config["steps"]):
            inputs = order.normal(size=(BATCH, 8)).astype(np.float32)
            wanted = inputs.sum(axis=1, keepdims=True)
            inputs, wanted = (
                jax.make_array_from_callback(array.shape, spread, lambda index, array=array: array[index])
                for array in (inputs, wanted)
            )
            params, loss = step(params, inputs, wanted)
        own = None
        if train.get_context().get_world_rank() == 0:
            own = train.Checkpoint.from_state({"params": jax.tree.map(np.asarray, params), "epoch": epoch})
        train.report({"loss": float(loss), "epoch": epoch}, checkpoint=own)
    return float(np.abs(np.asarray(params["w2"])).sum())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage_path")
    parser.add_argument("--run_name", default="train_jax")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    result = JaxTrainer(
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

"""Three ways to spend a training budget: random search, ASHA, and population based training.

    python examples/tune_schedulers.py --plot schedulers.png

A small network learns to tell two spirals apart; what is searched is the learning rate and the momentum. Random search
trains every trial to its end. ASHA does the same trials, but lets only the best go on at each milestone: it comes
about as far with a fraction of the steps. Population based training has the budget of random search: trials that are
behind go on from the checkpoint of one that is ahead, with other learning rates, so the learning rate changes while
training goes on.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
from typing import Any

import numpy as np

from holdfast import tune
from holdfast.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler
from holdfast.tune.search import BasicVariantGenerator

LAYERS = (2, 32, 32, 1)
POINTS = 400
BATCH = 20
SPACE = {"lr": tune.loguniform(1e-5, 1e-1), "momentum": tune.uniform(0.5, 0.95)}


def make_spirals(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, POINTS)
    turn = np.sqrt(rng.uniform(0.02, 1, POINTS)) * 3 * math.pi
    angle = turn + math.pi * label
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) / 8 + rng.normal(0, 0.02, (POINTS, 2))
    return points, label.astype(float)[:, None]


def forward(weights: list[np.ndarray], x: np.ndarray) -> list[np.ndarray]:
    """The activations of all layers; the last are probabilities."""
    found = [x]
    for at in range(0, len(weights), 2):
        x = x @ weights[at] + weights[at + 1]
        x = np.tanh(x) if at + 2 < len(weights) else 1 / (1 + np.exp(-np.clip(x, -30, 30)))
        found.append(x)
    return found


def gradients(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    activations = forward(weights, x)
    delta = (activations[-1] - y) / len(x)
    found: list[np.ndarray] = []
    for at in range(len(weights) - 2, -1, -2):
        before = activations[at // 2]
        found = [before.T @ delta, delta.sum(0), *found]
        delta = (delta @ weights[at].T) * (1 - before**2)
    return found


def loss(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    p = np.clip(forward(weights, x)[-1], 1e-6, 1 - 1e-6)
    return float(-np.mean(y * np.log(p) + (1 - y) * np.log(1 - p)))


def train_spirals(config: dict[str, Any]) -> None:
    """One trial: an epoch and a report at a time, and a checkpoint now and then. It goes on from its checkpoint, or
    from another trial's, with the learning rate and momentum of its own configuration."""
    x, y = make_spirals(0)
    x_new, y_new = make_spirals(1)
    rng = np.random.default_rng(2)
    weights: list[np.ndarray] = []
    for inner, outer in itertools.pairwise(LAYERS):
        weights += [rng.normal(0, 1 / math.sqrt(inner), (inner, outer)), np.zeros(outer)]
    velocity = [np.zeros_like(one) for one in weights]
    epoch = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        state = checkpoint.load_state()
        weights, velocity, epoch = state["weights"], state["velocity"], state["epoch"]
    while epoch < config["epochs"]:
        epoch += 1
        order = np.random.default_rng(epoch).permutation(POINTS)
        for start in range(0, POINTS, BATCH):
            batch = order[start : start + BATCH]
            for one, speed, gradient in zip(weights, velocity, gradients(weights, x[batch], y[batch]), strict=True):
                speed *= config["momentum"]
                speed -= config["lr"] * gradient
                one += speed
        checkpoint = None
        if epoch % config["save_every"] == 0:
            state = {"weights": weights, "velocity": velocity, "epoch": epoch}
            checkpoint = tune.Checkpoint.from_state(state)
        tune.report({"loss": loss(weights, x_new, y_new)}, checkpoint=checkpoint)


def search(
    name: str, storage: str, scheduler: TrialScheduler | None, trials: int, epochs: int, seed: int
) -> tune.ResultGrid:
    return tune.Tuner(
        train_spirals,
        param_space={**SPACE, "epochs": epochs, "save_every": max(1, epochs // 12)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=trials,
            scheduler=scheduler,
            search_alg=BasicVariantGenerator(random_state=seed),
        ),
        run_config=tune.RunConfig(
            name=name, storage_path=storage, checkpoint_config=tune.CheckpointConfig(num_to_keep=1)
        ),
    ).fit()


def make_schedulers(epochs: int) -> dict[str, TrialScheduler | None]:
    return {
        "random": None,
        "asha": ASHAScheduler(max_t=epochs, grace_period=2, reduction_factor=4),
        "pbt": PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=max(1, epochs // 12),
            perturbation_factors=(2.0, 0.5),
            hyperparam_mutations=SPACE,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=5, help="how often to repeat all three, with other seeds")
    parser.add_argument("--plot", help="write a plot of the best loss over time, of the first seed, to this file")
    options = parser.parse_args()
    found: dict[str, list[tuple[int, float]]] = {}
    axes = None
    with tempfile.TemporaryDirectory() as storage:
        for seed in range(1, options.seeds + 1):
            for name, scheduler in make_schedulers(options.epochs).items():
                results = search(f"{name}-{seed}", storage, scheduler, options.trials, options.epochs, seed)
                epochs = sum((one.metrics or {}).get("training_iteration", 0) for one in results)
                lowest = min(value for _, value in results.best_over_time())
                found.setdefault(name, []).append((epochs, lowest))
                print(f"seed {seed}, {name}: {epochs} epochs, lowest loss {lowest:.4f}", flush=True)
                if options.plot and seed == 1:
                    axes = results.plot(ax=axes)
    for name, runs in found.items():
        epochs, lowest = (statistics.median(values) for values in zip(*runs, strict=True))
        print(f"{name}: {epochs:g} epochs, lowest loss {lowest:.4f} (medians of {options.seeds})")
    if axes is not None:
        axes.legend(axes.get_lines(), list(found))
        axes.figure.savefig(options.plot)


if __name__ == "__main__":
    main()

"""`python -m tests.faults.programs.tune_main OPTIONS`: an experiment whose trials kill their driver, each time that so
many steps were made in all. Prints what came of the trials. OPTIONS is JSON: storage, searcher, scheduler, concurrent,
log (a file for the steps) and kills."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast import tune
from holdfast.tune.experiment_request import ExperimentRequest
from holdfast.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from holdfast.tune.search import ConcurrencyLimiter, Repeater, Searcher
from holdfast.tune.search.basic_variant import BasicVariantGenerator

_STEPS = 6
_TIME = "training_iteration"
_SEED = 5
"""Of every experiment, so that schedulers draw the same."""


def make_searcher(name: str) -> Searcher:
    if name == "basic":
        return BasicVariantGenerator(random_state=3)
    if name == "own":
        return _Descent()
    from optuna import samplers

    from holdfast.tune.search.optuna import OptunaSearch

    match name:
        case "cma-es":
            return OptunaSearch(sampler=samplers.CmaEsSampler(n_startup_trials=2), seed=3)
        case "qmc":
            return OptunaSearch(sampler=samplers.QMCSampler(), seed=3)
        case "nsga-ii":
            return OptunaSearch(sampler=samplers.NSGAIISampler(population_size=2), seed=3)
        case "gp":
            return OptunaSearch(sampler=samplers.GPSampler(n_startup_trials=2), seed=3)
    # With Optuna's ten trials at random, it would never look at a result here.
    tpe = OptunaSearch(sampler=samplers.TPESampler(n_startup_trials=2), seed=3)
    if name == "limited":
        return ConcurrencyLimiter(tpe, max_concurrent=1)
    return Repeater(tpe, repeat=2) if name == "repeated" else tpe


class _Descent(Searcher):
    """As users write them: it saves nothing, and suggests from what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = 0
        self._best = (float("inf"), 1.5)
        self._tried: dict[str, float] = {}

    def suggest(self, trial_id: str) -> dict[str, Any]:
        self._asked += 1
        draw = random.Random(f"{self.seed}:{self._asked}")
        x = min(2.0, max(1.0, self._best[1] + draw.uniform(-0.2, 0.2)))
        self._tried[trial_id] = x
        return {"x": x, "y": draw.choice([0.5, 1.0, 2.0])}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if result:
            self._best = min(self._best, (result[self.metric], self._tried[trial_id]))


def make_scheduler(name: str) -> TrialScheduler:
    match name:
        case "asha":
            return AsyncHyperBandScheduler(max_t=_STEPS, grace_period=1, reduction_factor=2)
        case "hyperband":
            return HyperBandScheduler(max_t=_STEPS, reduction_factor=2)
        case "median":
            return MedianStoppingRule(time_attr=_TIME, grace_period=2, min_samples_required=2)
        case "pbt" | "synchronous pbt":
            return PopulationBasedTraining(
                time_attr=_TIME,
                perturbation_interval=2,
                quantile_fraction=0.5,
                hyperparam_mutations={"x": tune.uniform(1, 2)},
                synch=name != "pbt",
            )
        case _:
            return FIFOScheduler()


def train(config: dict[str, Any]) -> None:
    """Halves its loss at each step, from where its checkpoint ends."""
    step, loss = 0, config["x"]
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            step, loss = json.loads(Path(directory, "state.json").read_text())
    while step < _STEPS:
        step, loss = step + 1, loss / (1 + config["y"])
        with Path(config["log"]).open("a") as log:
            log.write(f"{step}\n")
        if len(Path(config["log"]).read_text().splitlines()) in config["kills"]:
            os.kill(int(os.environ["TUNE_MAIN_PID"]), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state.json").write_text(json.dumps([step, loss]))
            tune.report({"loss": loss}, checkpoint=tune.Checkpoint.from_directory(directory))


def main(options: dict[str, Any]) -> list[Any]:
    os.environ["TUNE_MAIN_PID"] = str(os.getpid())
    make_settings = ExperimentRequest.settings
    ExperimentRequest.settings = lambda self, seed: make_settings(self, _SEED)  # type: ignore[method-assign]
    searcher = options["searcher"]
    space: dict[str, Any] = {"x": tune.uniform(1, 2), "y": tune.choice([0.5, 1.0, 2.0])}
    if searcher == "basic":
        space["y"] = tune.grid_search([0.5, 1.0, 2.0])
    constants = {name: options[name] for name in ("log", "kills")}
    results = tune.Tuner(
        train,
        param_space=constants if searcher == "own" else {**space, **constants},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=2 if searcher == "basic" else 6,
            max_concurrent_trials=options["concurrent"],
            search_alg=make_searcher(searcher),
            scheduler=make_scheduler(options["scheduler"]),
        ),
        run_config=tune.RunConfig(
            name="tuning", storage_path=options["storage"], checkpoint_config=tune.CheckpointConfig(num_to_keep=1)
        ),
    ).fit()
    assert not results.errors, results.errors
    return [
        [result.metrics["training_iteration"], result.metrics["loss"], result.config["x"], result.config["y"]]
        for result in results
        if result.metrics is not None and result.config is not None
    ]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)

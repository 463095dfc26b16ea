"""`python -m tests.faults.programs.tune_main STORAGE KILLS...`: an experiment whose trials kill their driver, each time
that so many steps were made in all. Prints what came of the trials."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast import tune
from holdfast.tune.schedulers import AsyncHyperBandScheduler
from holdfast.tune.search.basic_variant import BasicVariantGenerator

_STEPS = 6


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


def main(storage: str, kills: list[int]) -> list[Any]:
    os.environ["TUNE_MAIN_PID"] = str(os.getpid())
    results = tune.Tuner(
        train,
        param_space={
            "x": tune.uniform(1, 2),
            "y": tune.grid_search([0.5, 1.0, 2.0]),
            "log": f"{storage}.log",
            "kills": kills,
        },
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=2,
            max_concurrent_trials=1,
            search_alg=BasicVariantGenerator(random_state=3),
            scheduler=AsyncHyperBandScheduler(max_t=_STEPS, grace_period=1, reduction_factor=2),
        ),
        run_config=tune.RunConfig(name="tuning", storage_path=storage),
    ).fit()
    return [
        [result.metrics["training_iteration"], result.metrics["loss"], result.config["x"], result.config["y"]]
        for result in results
        if result.metrics is not None and result.config is not None
    ]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], [int(one) for one in sys.argv[2:]])), flush=True)

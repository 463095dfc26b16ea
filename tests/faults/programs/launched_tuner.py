"""An experiment for `holdfast launch`: `python -m tests.faults.programs.launched_tuner DIRECTORY`. Its two trials count
steps until a file `end` is there; prints what came of them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from holdfast import tune
from holdfast.tune import Checkpoint, FailureConfig, RunConfig, TuneConfig


def count(config: dict[str, Any]) -> None:
    directory = Path(config["directory"])
    step = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as restored:
            step = int(Path(restored, "step").read_text())
    with (directory / f"starts_{config['number']}").open("a") as file:
        file.write(f"{os.environ['TEST_HOST']} {step}\n")
    while not (directory / "end").exists():
        step += 1
        with tempfile.TemporaryDirectory() as made:
            Path(made, "step").write_text(str(step))
            tune.report({"step": step}, checkpoint=Checkpoint.from_directory(made))
        time.sleep(0.02)


def main() -> None:
    directory = Path(sys.argv[1])
    tuner = tune.Tuner(
        count,
        param_space={"number": tune.grid_search([1, 2]), "directory": str(directory)},
        tune_config=TuneConfig(metric="step", mode="max"),
        run_config=RunConfig(
            storage_path=str(directory / "storage"), failure_config=FailureConfig(max_failures=-1), verbose=0
        ),
    )
    results = tuner.fit()
    found = [[result.config, result.metrics, result.path] for result in results]
    best = [results.get_best_result(scope=scope).path for scope in ("last", "avg")]  # the second reads all reports
    print(json.dumps({"trials": found, "best": best, "path": results.experiment_path}), flush=True)


if __name__ == "__main__":
    main()

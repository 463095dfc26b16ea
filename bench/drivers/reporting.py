"""A driver whose worker reports as fast as it can, and stands still at the counts that `bench.journal` names.

`python -m bench.drivers.reporting STORAGE TOTAL EVERY COUNT...`: STORAGE/told gets a line of JSON when the function
begins and when it has made COUNT reports; it then waits for a line on the pipe STORAGE/go, as it does when resumed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from holdfast import train

__all__ = ["main"]


def _reports(config: dict[str, Any]) -> None:
    first = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            first = int(Path(directory, "count").read_text())
    storage = Path(config["storage"])
    _tell(storage, "began", first)
    if first:
        _wait(storage)
    for count in range(first + 1, config["total"] + 1):
        metrics = {"loss": 1.0 / count, "accuracy": 0.5, "step": count, "seconds": time.perf_counter()}
        if count % config["every"] == 0:
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "count").write_text(str(count))
                train.report(metrics, checkpoint=train.Checkpoint.from_directory(directory))
        else:
            train.report(metrics)
        if count in config["stops"]:
            _tell(storage, "reported", count)
            _wait(storage)


def _wait(storage: Path) -> None:
    with (storage / "go").open() as gate:
        gate.readline()


def _tell(storage: Path, what: str, count: int) -> None:
    with (storage / "told").open("a") as file:
        file.write(json.dumps({"what": what, "count": count, "at": time.time()}) + "\n")


def main() -> None:
    storage, total, every, *stops = sys.argv[1:]
    config = {"storage": storage, "total": int(total), "every": int(every), "stops": [int(stop) for stop in stops]}
    train.DataParallelTrainer(
        _reports,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=1),
        run_config=train.RunConfig(
            name="run",
            storage_path=storage,
            takeover=True,
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()

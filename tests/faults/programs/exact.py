"""Checks of a run of `jobs.steps`: whatever was killed, its results are those of an undisturbed run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from tests.faults.programs import jobs
from tests.faults.programs.sandbox import Sandbox

from holdfast.core import records as r
from holdfast.train import Result

__all__ = ["check_exact", "ends", "starts"]


def check_exact(sandbox: Sandbox, steps: int, *, world_size: int = 2) -> Result:
    """The curve (journal, result.json, progress.csv), the sample counts and every rank's last state are exact."""
    run = sandbox.storage / "run"
    result = Result.from_path(run)
    assert result.return_value == jobs.undisturbed(steps)[-1]
    frame = result.metrics_dataframe
    assert frame is not None
    assert list(frame["loss"]) == jobs.losses(steps)
    assert list(frame["samples"]) == list(range(1, steps + 1))
    lines = [json.loads(line) for line in (run / "result.json").read_text().splitlines()]
    assert [line["loss"] for line in lines] == jobs.losses(steps)
    with (run / "progress.csv").open(newline="") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == jobs.losses(steps)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        for rank in range(world_size):
            found = json.loads(Path(directory, f"rank_{rank}.json").read_text())
            assert found == jobs.undisturbed(found["step"], rank)[-1]
    sandbox.check_stored()
    return result


def ends(sandbox: Sandbox) -> list[r.GenerationEnded]:
    return [record for record in sandbox.records() if isinstance(record, r.GenerationEnded)]


def starts(sandbox: Sandbox) -> list[r.GenerationStarted]:
    return [record for record in sandbox.records() if isinstance(record, r.GenerationStarted)]

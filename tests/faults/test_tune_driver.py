"""The driver of an experiment is killed again and again, and the experiment comes out as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast.checkpoint.verify import verify
from holdfast.storage.locate import open_store

_REPOSITORY = Path(__file__).resolve().parents[2]


def run_driver(storage: Path, *kills: int) -> tuple[int, Any]:
    command = [sys.executable, "-m", "tests.faults.programs.tune_main", str(storage), *map(str, kills)]
    done = subprocess.run(
        command, cwd=_REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None


@pytest.mark.timeout(300)
def test_an_experiment_with_one_trial_at_a_time_ends_as_if_its_driver_had_never_died(sandbox: Sandbox) -> None:
    """Trials, configurations and results are the same, and so is who was stopped, and when."""
    sandbox.storage.mkdir()
    code, expected = run_driver(sandbox.storage / "undisturbed")
    assert code == 0
    storage = sandbox.storage / "killed"
    kills = (3, 11)
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        assert len(codes) <= len(kills), "a driver died that nobody killed"
        code, found = run_driver(storage, *kills)
        codes.append(code)
    assert codes == [-9] * len(kills) + [0]
    assert found == expected
    assert len({iterations for iterations, *_ in expected}) > 1, "the scheduler stopped nobody"
    for trial in (storage / "tuning").glob("train_*"):
        assert verify(open_store(trial), deep=True).intact

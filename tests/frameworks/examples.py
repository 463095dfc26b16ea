"""Runs a script of `examples/frameworks` as a user does, undisturbed or with a worker that is killed on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.programs.sandbox import Sandbox

from holdfast.core.records import GenerationStarted
from holdfast.train import Result

__all__ = ["check_survives", "run_example"]

_ROOT = Path(__file__).parents[2]
_KILL_WORKER = Path(__file__).parent / "kill_worker"


def run_example(sandbox: Sandbox, script: str | Path, name: str, kill: str | None = None) -> Result:
    """Run `script`, of the examples unless it is a whole path, to its end, without a word about forking. With `kill`
    ("rank:number"), that rank is killed before its report of that number."""
    command = [sys.executable, str(_ROOT / "examples" / "frameworks" / script)]
    command += ["--storage_path", str(sandbox.storage), "--run_name", name]
    # Python's own warning about forking beside threads, which is hidden otherwise.
    environment = os.environ | {"PYTHONWARNINGS": "default:This process:DeprecationWarning"}
    if kill is not None:
        environment |= {"KILL_WORKER": kill, "PYTHONPATH": str(_KILL_WORKER)}
    done = subprocess.run(
        command,
        check=False,
        env=environment,
        cwd=sandbox.root,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [path.read_text() for path in (sandbox.storage / name / "logs").rglob("*.log")]
    assert logs
    for text in [done.stdout, done.stderr, *logs]:
        said = [line for line in text.splitlines() if "fork" in line.lower() or "started cold" in line]
        assert said == []  # a framework warns, or workers are started cold
    return Result.from_path(sandbox.storage / name)


def check_survives(sandbox: Sandbox, script: str | Path, metric: str, kill: str) -> None:
    """A run in which a worker is killed ends as one that is left alone."""
    pytest.importorskip("torch")
    quiet = run_example(sandbox, script, "quiet")
    killed = run_example(sandbox, script, "killed", kill)
    generations = [record for record in sandbox.records("killed") if isinstance(record, GenerationStarted)]
    assert len(generations) == 2
    assert killed.return_value == quiet.return_value
    first, second = quiet.metrics_dataframe, killed.metrics_dataframe
    assert first is not None and second is not None
    assert list(first[metric]) == list(second[metric])
    sandbox.check_stored("killed")

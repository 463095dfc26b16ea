"""The example of schedulers runs, in small, and draws its plot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.programs.sandbox import Sandbox

EXAMPLE = Path(__file__).parents[2] / "examples" / "tune_schedulers.py"


def test_the_example_compares_three_ways_to_search(sandbox: Sandbox) -> None:
    pytest.importorskip("matplotlib")
    plot = sandbox.root / "plot.png"
    command = [sys.executable, str(EXAMPLE), "--trials", "2", "--epochs", "3", "--seeds", "1", "--plot", str(plot)]
    done = subprocess.run(
        command, env={**os.environ, "MPLBACKEND": "Agg"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^(\w+): (\d+) epochs, lowest loss \d", done.stdout, re.M))
    assert list(found) == ["random", "asha", "pbt"] and found["random"] == found["pbt"] == "6"
    assert plot.read_bytes().startswith(b"\x89PNG")

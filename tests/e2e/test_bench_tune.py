"""`make bench-tune` in small: an experiment and its peers are measured, and a journal is read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import tune


@pytest.mark.slow
@pytest.mark.parametrize("system", ["holdfast", "holdfast, torch", "Optuna, sqlite", "Optuna, journal"])
def test_an_experiment_is_measured(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    found = tune.measure(system, 3, tmp_path / "experiment")
    assert min(found["trials a second"], found["first result, s"], found["state a trial, bytes"]) > 0


def test_reading_an_experiment_back_is_measured(tmp_path: Path) -> None:
    tune.write_experiment(tmp_path / "experiment", 40)
    assert min(tune.restore_s(tmp_path / "experiment")) > 0


def test_aims_are_said_to_be_met_or_missed() -> None:
    aims = tune.Aims()
    aims.at_least(50, 50.0, "trials a second")
    aims.at_most(2, 2.1, "fsyncs a trial")
    assert aims.lines == [
        "met    50 trials a second (aim: at least 50)",
        "MISSED 2.1 fsyncs a trial (aim: at most 2)",
    ]

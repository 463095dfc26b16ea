"""`make bench-train` without peers: a start and a recovery are measured, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import train as bench_train
from bench.contenders import OURS


@pytest.mark.slow
def test_a_start_and_a_recovery_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bench_train, "_SETTLING_S", 0.1)
    line_s, whole_s = bench_train._first_line(OURS, tmp_path / "noop")
    assert 0 < line_s < whole_s
    assert bench_train._recovery(OURS, tmp_path / "steps") > 0
    assert bench_train._installed_mib("holdfast") > 1


def test_figures_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {OURS.name: 2.0, "other": 8.0}
    assert bench_train._table("t", "s", figures, aims={"other": 3.0})
    assert not bench_train._table("t", "s", figures, aims={"other": 5.0})
    assert "4.00x" in capsys.readouterr().out

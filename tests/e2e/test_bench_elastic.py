"""`make bench-elastic` without peers: a join, a notice and a killed host are measured, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import elastic


@pytest.mark.slow
def test_a_join_a_notice_and_a_killed_host_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Whether aims are met says nothing beside other tests, but for the steps.
    assert elastic.main(["--rounds", "1", "--only", "holdfast", "--dir", str(tmp_path)]) in (0, 1)
    out = capsys.readouterr().out
    assert out.count("  holdfast ") == 5
    assert "aim 0: met" in out, out
    assert list(tmp_path.iterdir()) == []


def test_aims_are_judged_against_the_peers_that_were_run(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"killed_s": 0.5, "join_s": 2.0, "stall_s": 0.2, "notice_s": 0.1, "durable_s": 0.1, "torch_s": 1.0}
    ours = elastic._Figures(steps_lost=0, **given)
    slow = elastic._Figures(killed_s=5.0, join_s=9.0, stall_s=1.9, steps_lost=7)
    assert elastic._show({"holdfast": [ours]})
    assert "MISSED" not in capsys.readouterr().out
    assert not elastic._show({"holdfast": [ours], "torchrun": [slow]})
    lines = capsys.readouterr().out.splitlines()
    judged = [line.strip() for line in lines if "torchrun takes" in line]
    assert judged == [
        "aim torchrun takes at least 10 times as long: met",
        "aim torchrun takes at least 10 times as long: MISSED",
    ]

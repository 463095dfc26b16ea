"""`make bench-frameworks` without frameworks: what its table says of a system that failed."""

from __future__ import annotations

import pytest
from bench.frameworks import Figures, _Rounds, _row


def _fail() -> Figures:
    raise TimeoutError("it took more than 1 s")


def test_a_peer_that_fails_is_a_row_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    taken = _Rounds("fsdp2")
    assert taken.add("ours", lambda: Figures(4.0, 0.5))
    assert taken.add("floor", lambda: Figures(float("nan"), 0.4))
    assert not taken.add("peer", _fail)
    assert not taken.add("peer", lambda: Figures(1.0, 1.0))  # not tried again
    assert _row("fsdp2", taken) == [
        "fsdp2", "4.0 s", "0.50 s", "0.40 s", "1.25", "torchrun", "failed", "-", "failed", "-"
    ]  # fmt: skip
    assert "fsdp2, peer: it took more than 1 s" in capsys.readouterr().err


def test_medians_of_the_rounds_are_compared() -> None:
    taken = _Rounds("xgboost")
    for seconds in (1.0, 9.0, 2.0):
        taken.add("ours", Figures, 10 * seconds, seconds)
        taken.add("peer", Figures, 20 * seconds, 30 * seconds)
    assert _row("xgboost", taken) == [
        "xgboost", "20.0 s", "2.00 s", "-", "-", "Ray Train", "40.0 s", "2.0", "60.0 s", "30.0"
    ]  # fmt: skip

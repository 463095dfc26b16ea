"""`make bench-faults`: each fault is measured once, and training goes on after it."""

from __future__ import annotations

import pytest
from bench import faults


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_fault_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults.main(["--rounds", "1"]) == 0
    out = capsys.readouterr().out
    measured = [line for line in out.rpartition("1 rounds\n")[2].splitlines() if " s  (" in line]
    assert len(measured) == 16, out

"""`make bench-checkpoint` with a small state: every comparison runs, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import checkpoint


@pytest.mark.slow
def test_every_comparison_is_printed_and_cleaned_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # At this size fixed costs decide, so whether aims are met says nothing.
    size = ["--size", "8MiB", "--rounds", "1", "--loop-seconds", "0.2"]
    assert checkpoint.main([*size, "--without-ray", "--dir", str(tmp_path)]) in (0, 1)
    out = capsys.readouterr().out
    for name in ("holdfast from_state", "memcpy into warm memory", "O_DIRECT + fsync", "dcp.async_save", "torch.load"):
        assert f"  {name} " in out
    assert out.count("aim <= ") == 8
    assert list(tmp_path.iterdir()) == []

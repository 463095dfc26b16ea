"""`bench.stream` with small files: every comparison is printed, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import stream


@pytest.mark.slow
def test_every_comparison_is_printed_and_cleaned_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # At this size fixed costs decide, so whether aims are met says nothing.
    assert stream.main(["--size", "2MiB", "--rounds", "1", "--dir", str(tmp_path)]) in (0, 1)
    out = capsys.readouterr().out
    peers = (
        "a TLS stream into nothing",
        "TLS, received, hashed, written",
        "written directly",
        "from the driver's machine",
    )
    for peer in peers:
        assert f"  {peer} " in out
    assert out.count("ours/this") == 4 and "load " in out
    assert list(tmp_path.iterdir()) == []

"""`make bench-store` with small files: every comparison runs, nothing is left behind, missed aims are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import store, timing


@pytest.mark.slow
def test_every_comparison_is_printed_and_cleaned_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # At this size fixed costs decide, so whether aims are met says nothing.
    assert store.main(["--size", "2MiB", "--rounds", "1", "--dir", str(tmp_path)]) in (0, 1)
    out = capsys.readouterr().out
    for peer in ("cp -r + fsync", "pyarrow copy_files", "rclone copy", "first commit"):
        assert f"  {peer} " in out
    assert out.count("ours/this") == 4 + 2 + 1 + 2 + 2 + 1
    assert out.count("uploaded 10.0% of the bytes   aim <= 11%: met") == 2
    assert list(tmp_path.iterdir()) == []


def test_aims_are_judged_by_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    contenders = [timing.Contender(name, lambda: None) for name in ("ours", "theirs")]
    section = timing.Section("title", contenders, [timing.Aim("theirs", 1.3)])
    assert timing.print_section(section, {"ours": 1.3, "theirs": 1.0}, 1024**2)
    assert not timing.print_section(section, {"ours": 1.31, "theirs": 1.0}, 1024**2)
    out = capsys.readouterr().out
    assert "ours/this  1.30   aim <= 1.30: met" in out
    assert "ours/this  1.31   aim <= 1.30: MISSED" in out


def test_contenders_alternate_after_a_warm_up(tmp_path: Path) -> None:
    order: list[str] = []

    def contender(name: str) -> timing.Contender:
        return timing.Contender(
            name,
            lambda: order.append(name),
            before=lambda: order.append(f"before {name}"),
            after=lambda: order.append(f"after {name}"),
        )

    section = timing.Section("title", [contender("a"), contender("b")])
    assert timing.race(section, 2, tmp_path).keys() == {"a", "b"}
    assert order == ["before a", "a", "after a", "before b", "b", "after b"] * 3


def test_a_size_that_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        store.main(["--size", "a lot"])
    assert "is no size: write 256MiB or 1GiB" in capsys.readouterr().err

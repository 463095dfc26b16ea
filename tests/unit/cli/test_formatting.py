"""How sizes, times and metrics read."""

from __future__ import annotations

import json

import pytest

from holdfast.cli.formatting import (
    count_text,
    duration_text,
    metrics_text,
    print_json,
    print_table,
    size_text,
    time_text,
)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1536 * 1024**2, "1.5 GiB"),
        (2048 * 1024**5, "2048.0 PiB"),
    ],
)
def test_sizes_count_in_powers_of_1024(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (75, "75 s"), (100, "2 min"), (6000, "1 h 40 min"), (11100, "3 h 5 min")],
)
def test_durations_get_coarser_as_they_grow(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_times_are_printed_without_fractions() -> None:
    assert time_text("2026-01-31T12:00:05.123Z") == "2026-01-31 12:00:05Z"
    assert time_text("odd") == "odd"


def test_counts_use_the_plural() -> None:
    assert [count_text(number, "file") for number in (0, 1, 1234)] == ["0 files", "1 file", "1,234 files"]


def test_metrics_are_short() -> None:
    assert metrics_text({"loss": 0.123456, "epoch": 3, "tag": "warm"}) == "loss=0.1235 epoch=3 tag=warm"


def test_a_table_aligns_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME", "SIZE", ""), [("a", "1 B", "x"), ("long_name", "10 B", "")], right=(1,))
    assert capsys.readouterr().out.splitlines() == [
        "NAME       SIZE",
        "a           1 B  x",
        "long_name  10 B",
    ]


def test_nan_and_infinity_become_strings_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "name": "Größe"})
    out = capsys.readouterr().out
    assert "Größe" in out
    assert json.loads(out, parse_constant=pytest.fail) == {
        "loss": {"$float": "nan"},
        "name": "Größe",
    }

"""How things are said."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.views.terminal.box import box
from holdfast.views.terminal.formatting import brief_time, cell, count, long_time, name_ranks, place


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-1, "0s"), (54.9, "54s"), (90, "1min 30s"), (7205, "2hr 0min 5s"), (97200, "1d 3hr 0min 0s")],
)
def test_long_format_of_durations(seconds: float, said: str) -> None:
    assert long_time(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (0.123, "0.12 s"), (4.06, "4.1 s"), (54.4, "54 s"), (125, "2min 5s")]
)
def test_short_format_of_durations(seconds: float, said: str) -> None:
    assert brief_time(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (74.554701, "74.5547"),
        (0.0, "0.0"),
        (3.0, "3.0"),
        (1.23456789e-5, "1.2346e-05"),
        (-2.5e12, "-2.5e+12"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (12345678901, "12345678901"),
        (True, "True"),
        (None, "None"),
        ("x" * 50, "x" * 37 + "..."),
        ([1, 2], "[1, 2]"),
    ],
)
def test_formatting_of_table_cells(value: Any, said: str) -> None:
    assert cell(value) == said


@pytest.mark.parametrize(
    ("ranks", "said"),
    [([3], "rank 3"), ([1, 0], "ranks 0 and 1"), ([4, 2, 3, 9, 0], "ranks 0, 2-4 and 9"), (range(16), "ranks 0-15")],
)
def test_formatting_of_rank_lists(ranks: list[int], said: str) -> None:
    assert name_ranks(ranks) == said


def test_formatting_of_paths_and_counts() -> None:
    assert place("/mnt/runs/a", "checkpoint_000001") == "(local)/mnt/runs/a/checkpoint_000001"
    assert place("gs://bucket/a/", "checkpoint_000001") == "gs://bucket/a/checkpoint_000001"
    assert [count(1, "recovery"), count(2, "recovery"), count(0, "iteration")] == [
        "1 recovery",
        "2 recoveries",
        "0 iterations",
    ]


def test_drawing_of_boxes() -> None:
    assert box("A long title indeed", [("a", "1"), ("bb", "22")], fine=False, right=True) == (
        "+---------------------+\n"
        "| A long title indeed |\n"
        "+---------------------+\n"
        "| a                 1 |\n"
        "| bb               22 |\n"
        "+---------------------+"
    )
    assert box("T", [("a", "1"), ("bb", "22")]).splitlines()[3] == "│ a    1  │"
    assert box("T", []) == "╭───╮\n│ T │\n├───┤\n╰───╯"

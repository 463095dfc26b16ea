"""How durations, times, sizes, counts, ranks, metrics and places are written."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.views.formatting import (
    brief_duration,
    count_text,
    duration_text,
    iso_time,
    metric_text,
    metrics_text,
    place,
    ranks_brief,
    ranks_text,
    rough_duration,
    running_time,
    size_text,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (54.9, "54s"), (90, "1min 30s"), (7205, "2hr 0min 5s"), (97200, "1d 3hr 0min 0s")],
)
def test_running_times(seconds: float, text: str) -> None:
    assert running_time(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (0.123, "0.12 s"), (4.06, "4.1 s"), (54.4, "54 s"), (125, "2min 5s")]
)
def test_brief_durations(seconds: float, text: str) -> None:
    assert brief_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0688249, "0.06882"),
        (1e-7, "1e-07"),
        (float("nan"), "nan"),
        (3, "3"),
        ("a\nb", "a b"),
        ("x" * 50, "x" * 37 + "..."),
    ],
)
def test_metrics_have_four_digits(value: Any, text: str) -> None:
    assert metric_text(value) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 0], "ranks 0 and 1"), ([4, 2, 3, 9, 0], "ranks 0, 2-4 and 9"), (range(16), "ranks 0-15")],
)
def test_formatting_of_rank_lists(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([1, 0], "ranks 0-1"), ([4, 2, 3, 9, 0], "ranks 0,2-4,9")]
)
def test_rank_lists_for_the_margin(ranks: list[int], text: str) -> None:
    assert ranks_brief(ranks) == text


def test_formatting_of_paths_and_counts() -> None:
    assert place("/mnt/runs/a", "checkpoint_000001") == "(local)/mnt/runs/a/checkpoint_000001"
    assert place("gs://bucket/a/", "checkpoint_000001") == "gs://bucket/a/checkpoint_000001"
    assert [count_text(1, "recovery"), count_text(2, "recovery"), count_text(0, "iteration")] == [
        "1 recovery",
        "2 recoveries",
        "0 iterations",
    ]


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
def test_rough_durations_get_coarser_as_they_grow(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.00 s"), (0.254, "0.25 s"), (22, "22.0 s"), (183, "3 min 3 s"), (7500, "2 h 5 min")],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_times_are_printed_without_fractions() -> None:
    assert iso_time("2026-01-31T12:00:05.123Z") == "2026-01-31 12:00:05Z"
    assert iso_time("odd") == "odd"


def test_counts_use_the_plural() -> None:
    assert [count_text(number, "file", grouped=True) for number in (0, 1, 1234)] == ["0 files", "1 file", "1,234 files"]


def test_metrics_are_short() -> None:
    assert metrics_text({"loss": 0.123456, "epoch": 3, "tag": "warm"}) == "loss=0.1235 epoch=3 tag=warm"

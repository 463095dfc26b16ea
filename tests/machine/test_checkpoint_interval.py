"""`should_checkpoint` asks as often as the stall, the storage and the failures make worth while."""

from __future__ import annotations

import itertools
import math

from holdfast.core.checkpoint_interval import CheckpointInterval


def drive(
    checkpoint_interval: CheckpointInterval, *, step_s: float, seconds: float, failures: int = 0
) -> tuple[list[float], int]:
    """Steps of equal length, a checkpoint whenever one is due: when it was due, and how often ranks asked."""
    now, due_at, asks, next_call = 0.0, [], 0, 1
    checkpoint_interval.begin(now)
    for call in range(1, int(seconds / step_s) + 1):
        now += step_s
        if call < next_call:
            continue
        asks += 1
        due, next_call = checkpoint_interval.ask(call, failures, now)
        assert next_call > call
        if due:
            due_at.append(now)
            checkpoint_interval.stalled(checkpoint_interval.stall_s, now)
    return due_at, asks


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def test_the_interval_follows_youngs_formula() -> None:
    checkpoint_interval = CheckpointInterval(target_overhead=0.02, stall_s=0.5)
    checkpoint_interval.begin(0.0)
    assert checkpoint_interval.interval_s(failures=0, now=0.0) == math.sqrt(2 * 0.5 * 4 * 3600)


def test_failures_shorten_the_interval_down_to_the_overhead_limit() -> None:
    checkpoint_interval = CheckpointInterval(target_overhead=0.02, stall_s=0.5)
    checkpoint_interval.begin(0.0)
    calm, stormy = checkpoint_interval.interval_s(0, 100.0), checkpoint_interval.interval_s(3, 100.0)
    assert stormy < calm
    assert checkpoint_interval.interval_s(100_000, 100.0) == 0.5 / 0.02


def test_slow_storage_lengthens_the_interval() -> None:
    checkpoint_interval = CheckpointInterval(target_overhead=0.5, stall_s=0.001)
    checkpoint_interval.begin(0.0)
    checkpoint_interval.stored(500.0)
    assert checkpoint_interval.interval_s(0, 0.0) == 500.0


def test_the_controller_is_asked_about_once_a_second() -> None:
    for step_s in (0.001, 0.02, 0.3):
        due_at, asks = drive(CheckpointInterval(target_overhead=0.02, stall_s=0.01), step_s=step_s, seconds=200.0)
        assert asks < 200 * 1.5 + 20
        assert due_at, step_s
        wanted = CheckpointInterval(target_overhead=0.02, stall_s=0.01)
        wanted.begin(0.0)
        for gap in gaps(due_at):
            assert abs(gap - wanted.interval_s(0, 100.0)) < 1.5 + step_s


def test_long_steps_ask_the_controller_at_every_step() -> None:
    due_at, asks = drive(CheckpointInterval(target_overhead=0.02, stall_s=0.01), step_s=30.0, seconds=3000.0)
    assert asks == 100
    assert len(due_at) == 100


def test_the_interval_follows_the_measured_stall() -> None:
    checkpoint_interval = CheckpointInterval(target_overhead=0.02)
    for _ in range(30):
        checkpoint_interval.stalled(2.0, 0.0)
    assert abs(checkpoint_interval.stall_s - 2.0) < 0.01

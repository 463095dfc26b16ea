"""Liveness: unanswered pings count only while the controller's own event loop runs on time."""

from __future__ import annotations

from holdfast.wire.liveness import LoopWatch


def test_a_loop_that_runs_on_time_never_stalls() -> None:
    watch = LoopWatch(8.0, 100.0)
    assert watch.interval_s == 2.0
    assert [watch.stalled_s(100.0 + at) for at in (2.0, 4.1, 4.2, 8.1)] == [0.0] * 4


def test_a_gap_of_more_than_two_intervals_is_a_stall_and_is_told_once() -> None:
    watch = LoopWatch(8.0, 100.0)
    assert watch.stalled_s(145.0) == 45.0
    assert watch.stalled_s(146.0) == 0.0


def test_short_timeouts_do_not_make_ordinary_delays_stalls() -> None:
    watch = LoopWatch(0.1, 100.0)
    assert watch.stalled_s(100.4) == 0.0

"""Ranks that do not report as often as others are named when a checkpoint waits for them."""

from __future__ import annotations

from tests.machine.rig import NOTHING, persist, report, running, two_nodes

from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.machine import Step


def test_lagging_ranks_are_reported_once() -> None:
    rig = running(workers=3)
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(report(1, 6.0, rank=1), 6.0)
    assert rig.deadline == 35.0
    assert rig.feed(e.TimePassed(), 34.0) == NOTHING
    lagging = r.RanksLagging(at=35.0, generation=1, number=1, ranks=(2,))
    assert rig.feed(e.TimePassed(), 35.0) == Step([lagging], [])
    assert rig.deadline is None
    assert rig.feed(e.TimePassed(), 99.0) == NOTHING


def test_metric_reports_do_not_make_ranks_lag() -> None:
    rig = two_nodes()
    rig.feed(report(1, 5.0), 5.0)
    assert rig.deadline is None


def test_a_rank_that_reported_late_is_not_lagging() -> None:
    rig = two_nodes(lag_warning_s=1.0)
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    late = rig.feed(report(1, 9.0, rank=1), 9.0)
    assert late == Step([], [persist(1, ((0, "a"),), world_size=2)])


def test_ranks_of_a_stopped_generation_are_not_lagging() -> None:
    rig = two_nodes(max_failures=1, lag_warning_s=5.0)
    rig.feed(report(1, 5.0, checkpoint=True, rank=1), 5.0)
    rig.feed(e.AgentLost(agent="b", why="its connection closed"), 6.0)
    assert rig.deadline is None
    assert rig.feed(e.TimePassed(), 20.0) == NOTHING

"""Silence for longer than the user allows is a hang, unless something else explains it."""

from __future__ import annotations

import pytest
from tests.machine.rig import NOTHING, Rig, began, checkpoint_of, joined, report, running, stored, two_nodes

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import Report
from holdfast.core.machine import Step

CAUSE = "made no report for 10 s and was taken for hung"


def test_a_hung_rank_is_stopped_with_its_stacks_dumped() -> None:
    rig = running(progress_timeout_s=10.0, max_failures=0)
    assert rig.deadline == 13.0
    rig.feed(report(1, 8.0), 8.0)
    assert rig.deadline == 18.0
    assert rig.feed(e.TimePassed(), 17.0) == NOTHING
    stop = c.StopWorkers(generation=1, agents=("a",), dump_stacks=True)
    assert rig.feed(e.TimePassed(), 18.0) == Step([], [stop])
    assert rig.deadline is None
    failure = r.WorkerFailure(rank=0, cause=CAUSE, agent="a", host="host-a")
    ended = r.GenerationEnded(
        at=19.0,
        generation=1,
        why="no progress for 10 s",
        detected_at=18.0,
        iteration=1,
        counted=True,
        failures=(failure,),
    )
    failed = r.RunFailed(at=19.0, error=f"rank 0 {CAUSE}", failures=(failure,))
    decided = rig.feed(e.WorkersStopped(generation=1, agent="a"), 19.0)
    assert decided == Step([ended, failed], [c.EndRun(status=c.RunStatus.FAILED)])


def test_the_rank_that_has_been_silent_longest_is_blamed() -> None:
    rig = two_nodes(progress_timeout_s=10.0, max_failures=1)
    rig.feed(report(1, 5.0, rank=1), 5.0)
    rig.feed(report(1, 6.0), 6.0)
    assert rig.deadline == 15.0
    rig.feed(e.TimePassed(), 15.0)
    assert rig.state.generation is not None
    assert rig.state.generation.failures == [r.WorkerFailure(rank=1, cause=CAUSE, agent="b", host="host-b")]


def test_without_a_timeout_no_rank_hangs() -> None:
    rig = running()
    assert rig.deadline is None
    assert rig.feed(e.TimePassed(), 1e9) == NOTHING


def test_ranks_that_never_report_are_not_watched_while_others_report() -> None:
    rig = two_nodes(progress_timeout_s=10.0)
    for now in range(5, 50, 5):
        assert rig.feed(report(now // 5, float(now)), float(now)).commands == []
    assert rig.deadline == 55.0


def test_starting_workers_are_not_hung() -> None:
    rig = Rig(workers_min=1, progress_timeout_s=10.0)
    rig.feed(began(), 0.0)
    rig.feed(joined("a"), 1.0)
    rig.feed(e.AgentPrepared(agent="a"), 2.0)
    assert rig.deadline is None
    assert rig.feed(e.TimePassed(), 100.0) == NOTHING
    rig.feed(e.WorkersStarted(generation=1, agent="a"), 100.0)
    assert rig.deadline == 110.0


def test_the_hang_timeout_counts_from_the_end_of_an_upload() -> None:
    rig = running(progress_timeout_s=10.0)
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    assert rig.deadline is None
    assert rig.feed(e.TimePassed(), 100.0) == NOTHING
    rig.feed(checkpoint_of(1, stored(0, 1)), 100.0)
    assert rig.deadline == 110.0


def test_the_hang_timeout_of_all_ranks_restarts_when_a_waiting_rank_continues() -> None:
    rig = two_nodes(progress_timeout_s=10.0)
    for rank in (0, 1):
        rig.feed(report(1, 5.0, checkpoint=True, rank=rank), 5.0)
    rig.feed(e.WorkerWaited(generation=1, rank=0, waiting=True), 6.0)
    rig.feed(checkpoint_of(1, stored(0, 1)), 100.0)
    assert rig.feed(e.WorkerWaited(generation=1, rank=0, waiting=False), 101.0) == NOTHING
    assert rig.deadline == 111.0


def test_a_rank_that_waits_does_not_hide_the_one_that_it_waits_for() -> None:
    rig = two_nodes(progress_timeout_s=10.0, max_failures=1)
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(e.WorkerWaited(generation=1, rank=0, waiting=True), 6.0)
    assert rig.deadline == 16.0
    assert [type(one) for one in rig.feed(e.TimePassed(), 16.0).commands] == [c.StopWorkers]
    assert rig.state.generation is not None
    assert rig.state.generation.failures == [r.WorkerFailure(rank=1, cause=CAUSE, agent="b", host="host-b")]


def test_a_rank_waits_in_its_report_until_that_is_settled_and_not_longer() -> None:
    rig = two_nodes(progress_timeout_s=10.0)
    waiting = Report(number=1, at=5.0, checkpoint=True, waits=True)
    rig.feed(report(1, 5.0), 5.0)
    rig.feed(e.RankReported(generation=1, rank=1, reports=(waiting,)), 5.0)
    assert rig.deadline is None, "it is being stored"
    rig.feed(checkpoint_of(1, stored(0, 1)), 100.0)
    rig.feed(report(2, 105.0), 105.0)
    assert rig.deadline == 110.0, "rank 1 went on at 100"


def test_a_rank_that_waits_in_its_report_does_not_hide_the_one_that_it_waits_for() -> None:
    rig = two_nodes(progress_timeout_s=10.0, max_failures=1)
    waiting = Report(number=1, at=5.0, metrics={"loss": 1}, checkpoint=True, waits=True)
    rig.feed(e.RankReported(generation=1, rank=0, reports=(waiting,)), 5.0)
    assert rig.deadline == 15.0
    assert [type(one) for one in rig.feed(e.TimePassed(), 15.0).commands] == [c.StopWorkers]
    assert rig.state.generation is not None
    assert [failure.rank for failure in rig.state.generation.failures] == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_finished_rank_is_not_watched(rank: int) -> None:
    rig = two_nodes(progress_timeout_s=10.0)
    for one in (0, 1):
        rig.feed(report(1, 5.0, rank=one), 5.0)
    rig.feed(e.WorkerFinished(generation=1, rank=rank), 6.0)
    rig.feed(report(2, 12.0, rank=1 - rank), 12.0)
    assert rig.deadline == 22.0


def test_a_stalled_controller_is_no_hang() -> None:
    """It was stopped for longer than the timeout: everybody's silence counts from its end."""
    rig = two_nodes(progress_timeout_s=10.0)
    rig.feed(report(1, 5.0), 5.0)
    rig.feed(report(1, 5.0, rank=1), 5.0)
    assert rig.feed(e.ControllerStalled(stalled_s=45.0), 50.0) == NOTHING
    assert rig.feed(e.TimePassed(), 50.0) == NOTHING
    assert rig.feed(report(2, 51.0), 51.0).commands == []
    assert rig.deadline == 60.0


def test_a_stalled_controller_extends_the_timeout_for_agents() -> None:
    rig = Rig(workers_min=1, agents_timeout_s=100.0)
    rig.feed(began(), 0.0)
    assert rig.deadline == 100.0
    assert rig.feed(e.ControllerStalled(stalled_s=45.0), 50.0) == NOTHING
    assert rig.deadline == 145.0

"""Ranks that wait for all checkpoints up to a report are told when some rank lags, when none does, and at the end."""

from __future__ import annotations

from tests.machine.rig import NOTHING, checkpoint_of, committed, died, exited, persist, report, stored, two_nodes

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.machine import Step


def waits(rank: int, until_report: int, generation: int = 1) -> e.WorkerWaited:
    return e.WorkerWaited(generation=generation, rank=rank, waiting=True, until_report=until_report)


def told(rank: int, until_report: int, lagging: tuple[int, ...] = (), settled: bool = False) -> c.AnnounceSettled:
    return c.AnnounceSettled(
        generation=1,
        rank=rank,
        until_report=until_report,
        lagging=lagging,
        settled=settled,
        agents=("ab"[rank],),
    )


def test_a_rank_without_a_part_is_told_when_the_others_checkpoint_is_committed() -> None:
    rig = two_nodes()
    rig.feed(report(1, 5.0, rank=1), 5.0)
    assert rig.feed(waits(1, 1), 6.0) == Step([], [told(1, 1, lagging=(0,))])
    assert rig.feed(e.TimePassed(), 7.0) == NOTHING
    reported = rig.feed(report(1, 8.0, checkpoint=True), 8.0)
    assert reported.commands == [persist(1, ((0, "a"),), world_size=2), told(1, 1)]
    found = stored(0, 1)
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name=found.name, token=found.token, agents=("a", "b"))
    done = rig.feed(checkpoint_of(1, found), 9.0)
    assert done == Step([committed(found, 9.0)], [announced, told(1, 1, settled=True)])
    assert rig.feed(e.TimePassed(), 10.0) == NOTHING


def test_a_checkpoint_that_is_given_up_is_settled() -> None:
    rig = two_nodes()
    for rank in (0, 1):
        rig.feed(report(1, 5.0, checkpoint=True, rank=rank), 5.0)
    rig.feed(waits(0, 1), 6.0)
    done = rig.feed(e.CheckpointFailed(ticket=e.Ticket(1, 1), error="no"), 7.0)
    assert done.commands[-1] == told(0, 1, settled=True)


def test_with_nothing_under_way_the_answer_comes_at_once() -> None:
    rig = two_nodes()
    for rank in (0, 1):
        rig.feed(report(1, 5.0, rank=rank), 5.0)
    assert rig.feed(waits(0, 1), 6.0) == Step([], [told(0, 1, settled=True)])


def test_later_checkpoints_are_not_waited_for() -> None:
    rig = two_nodes()
    for rank in (0, 1):
        rig.feed(report(1, 5.0, rank=rank), 5.0)
    for rank in (0, 1):
        rig.feed(report(2, 6.0, checkpoint=True, rank=rank), 6.0)
    assert rig.feed(waits(0, 1), 7.0) == Step([], [told(0, 1, settled=True)])


def test_a_rank_that_has_finished_does_not_lag() -> None:
    rig = two_nodes()
    rig.feed(e.WorkerFinished(generation=1, rank=1), 4.0)
    rig.feed(report(1, 5.0), 5.0)
    assert rig.feed(waits(0, 1), 6.0) == Step([], [told(0, 1, settled=True)])


def test_a_rank_that_waits_no_longer_is_told_nothing() -> None:
    rig = two_nodes()
    rig.feed(report(1, 5.0), 5.0)
    rig.feed(waits(0, 1), 6.0)
    rig.feed(e.WorkerWaited(generation=1, rank=0, waiting=False), 7.0)
    assert rig.feed(report(1, 8.0, rank=1), 8.0) == NOTHING


def test_the_question_of_a_generation_that_has_ended_is_not_answered() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(report(1, 5.0), 5.0)
    rig.feed(exited(died(1, agent="b")), 6.0)
    for agent in ("a", "b"):
        rig.feed(e.WorkersStopped(generation=1, agent=agent), 7.0)
    assert rig.feed(waits(0, 1), 8.0) == NOTHING

"""Reports become records at once; a checkpoint is persisted when every rank has reported it, one after the other."""

from __future__ import annotations

import pytest
from tests.machine.rig import (
    NOTHING,
    checkpoint_of,
    committed,
    item,
    persist,
    report,
    reported,
    running,
    stored,
    two_nodes,
)

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import Report
from holdfast.core.machine import Step


def test_a_report_is_a_record() -> None:
    rig = running()
    assert rig.feed(report(1, 5.0), 5.1) == Step([reported(1, 5.0)], [])
    both = e.RankReported(
        generation=1, rank=0, reports=(item(2, 6.0, metrics={"loss": 2}), item(3, 7.0, metrics={"loss": 3}))
    )
    assert rig.feed(both, 7.1) == Step([reported(2, 6.0), reported(3, 7.0)], [])
    assert (rig.state.durable.iteration, rig.state.durable.metrics) == (3, {"loss": 3})


def test_a_report_delivered_twice_counts_once() -> None:
    rig = running()
    rig.feed(report(1, 5.0), 5.0)
    assert rig.feed(report(1, 5.0), 5.5) == NOTHING


def test_only_the_metrics_of_rank_0_are_kept() -> None:
    rig = running(workers=2)
    assert rig.feed(report(1, 5.0, rank=1), 5.0) == NOTHING
    assert rig.feed(report(1, 5.1), 5.1) == Step([reported(1, 5.1)], [])


def test_a_checkpoint_is_persisted_and_its_workers_are_notified() -> None:
    rig = running()
    decided = rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    assert decided == Step([reported(1, 5.0, checkpoint=True)], [persist(1, ((0, "a"),))])
    found = stored(0, 1)
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name="checkpoint_000000", token="token-0", agents=("a",))
    assert rig.feed(checkpoint_of(1, found), 6.0) == Step([committed(found, 6.0)], [announced])
    assert rig.feed(checkpoint_of(1, found), 6.5) == NOTHING


def test_checkpoints_are_persisted_one_after_the_other() -> None:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    assert rig.feed(report(2, 6.0, checkpoint=True), 6.0) == Step([reported(2, 6.0, checkpoint=True)], [])
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name="checkpoint_000000", token="token-0", agents=("a",))
    then = persist(2, ((0, "a"),), at_least_index=1)
    assert rig.feed(checkpoint_of(1, stored(0, 1)), 7.0) == Step([committed(stored(0, 1), 7.0)], [announced, then])


def test_a_checkpoint_is_persisted_when_every_rank_reported_it() -> None:
    rig = two_nodes()
    assert rig.feed(report(1, 5.0, checkpoint=True), 5.0) == Step([reported(1, 5.0, checkpoint=True)], [])
    parts = ((0, "a"), (1, "b"))
    decided = rig.feed(report(1, 6.0, checkpoint=True, rank=1), 6.0)
    assert decided == Step([], [persist(1, parts, world_size=2)])
    announced = c.AnnounceCheckpoint(
        ticket=e.Ticket(1, 1), name="checkpoint_000000", token="token-0", agents=("a", "b")
    )
    assert rig.feed(checkpoint_of(1, stored(0, 1)), 7.0).commands == [announced]


def test_a_checkpoint_of_one_rank_has_the_metrics_that_rank_0_reported_with_it() -> None:
    rig = two_nodes()
    rig.feed(report(1, 5.0), 5.0)
    rig.feed(report(2, 5.5), 5.5)
    decided = rig.feed(report(1, 6.0, checkpoint=True, rank=1), 6.0)
    assert decided == Step([], [persist(1, ((1, "b"),), world_size=2)])


def test_commits_are_sent_to_all_agents_and_failures_to_those_with_parts() -> None:
    rig = two_nodes()
    for number in (1, 2):
        rig.feed(report(number, 5.0, checkpoint=True), 5.0)
        rig.feed(report(number, 5.0, rank=1), 5.0)
    announced = c.AnnounceCheckpoint(
        ticket=e.Ticket(1, 1), name="checkpoint_000000", token="token-0", agents=("a", "b")
    )
    assert rig.feed(checkpoint_of(1, stored(0, 1)), 7.0).commands[0] == announced
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 2), name=None, agents=("a",))
    failed = e.CheckpointFailed(ticket=e.Ticket(1, 2), error="the disk is full")
    assert rig.feed(failed, 8.0).commands == [announced]


def test_a_rank_that_has_finished_is_not_waited_for() -> None:
    rig = two_nodes()
    rig.feed(e.WorkerFinished(generation=1, rank=1), 4.0)
    decided = rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    assert decided == Step([reported(1, 5.0, checkpoint=True)], [persist(1, ((0, "a"),), world_size=2)])


def test_rank_0_names_the_checkpoint() -> None:
    rig = running()
    named = Report(number=1, at=5.0, metrics={"loss": 1}, checkpoint=True, checkpoint_dir_name="best")
    decided = rig.feed(e.RankReported(generation=1, rank=0, reports=(named,)), 5.0)
    assert decided.commands == [persist(1, ((0, "a"),), name="best")]


def test_a_checkpoint_that_storage_refuses_is_given_up_and_training_continues() -> None:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    failed = e.CheckpointFailed(ticket=e.Ticket(1, 1), error="the disk is full")
    given_up = r.CheckpointAbandoned(at=6.0, generation=1, iteration=1, why="the disk is full")
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name=None, agents=("a",))
    assert rig.feed(failed, 6.0) == Step([given_up], [announced])
    assert rig.feed(report(2, 7.0), 7.0) == Step([reported(2, 7.0)], [])


def test_events_of_another_generation_are_ignored() -> None:
    rig = running()
    for stale in (
        report(1, 5.0, checkpoint=True, generation=7),
        e.WorkersStarted(generation=7, agent="a"),
        e.WorkerWaited(generation=7, rank=0, waiting=True),
        e.WorkerFinished(generation=7, rank=0),
        e.WorkersStopped(generation=7, agent="a"),
        e.WorkerExited(generation=7, failure=r.WorkerFailure(rank=0, cause="died")),
    ):
        assert rig.feed(stale, 5.0) == NOTHING


def named_report(rank: int, name: str | None, part: bool = True, adopt: bool = False) -> e.RankReported:
    item = Report(
        number=1,
        at=5.0,
        metrics={"loss": 1} if rank == 0 else None,
        checkpoint=part,
        checkpoint_dir_name=name,
        adopt=adopt,
    )
    return e.RankReported(generation=1, rank=rank, reports=(item,))


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize(
    ("reports", "name", "adopt"),
    [
        ((named_report(0, "zero"), named_report(1, "one"), named_report(2, "two")), "zero", False),
        ((named_report(0, "zero", part=False), named_report(1, "one"), named_report(2, None)), "zero", False),
        ((named_report(0, None, part=False), named_report(1, None), named_report(2, "two")), "two", False),
        ((named_report(0, None), named_report(1, "one", part=False), named_report(2, "two")), "two", False),
        ((named_report(0, None), named_report(1, None), named_report(2, None, part=False)), None, False),
        ((named_report(0, "zero"), named_report(1, None), named_report(2, "two", adopt=True)), "two", True),
    ],
)
def test_rank_zero_names_the_checkpoint_and_otherwise_the_lowest_rank_that_does(
    reports: tuple[e.RankReported, ...], name: str | None, adopt: bool, first: int
) -> None:
    """In whatever order the reports arrive; files that lie in storage already are where they are."""
    rig = running(workers=3)
    commands = [command for at in range(3) for command in rig.feed(reports[(first + at) % 3], 5.0).commands]
    (found,) = [command for command in commands if isinstance(command, c.PersistCheckpoint)]
    assert (found.name, found.adopt) == (name, adopt)

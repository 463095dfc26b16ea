"""A rank dies before it reports a checkpoint that the others hold in full: it is committed all the same."""

from __future__ import annotations

from tests.machine.rig import (
    Rig,
    checkpoint_of,
    committed,
    died,
    exited,
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

TICKET = e.Ticket(1, 1)
LOST_B = e.AgentLost(agent="b", why="its connection closed")


def whole(number: int, at: float, rank: int, *needed: int) -> e.RankReported:
    """A report with a checkpoint, of a rank that knows which ranks' parts it needs: its own, unless told otherwise."""
    item = Report(number=number, at=at, metrics={"loss": number}, checkpoint=True, needed_ranks=needed or (rank,))
    return e.RankReported(generation=1, rank=rank, reports=(item,))


def stop_both(rig: Rig, at: float) -> list[r.Record | c.Command]:
    """The workers of both nodes are gone; what that led to."""
    rig.feed(e.WorkersStopped(generation=1, agent="a"), at)
    decided = rig.feed(e.WorkersStopped(generation=1, agent="b"), at)
    return [*decided.records, *decided.commands]


def test_a_checkpoint_that_rank_0_holds_in_full_is_committed_without_the_dead() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(whole(1, 5.0, 0), 5.0)
    assert rig.feed(exited(died(1, agent="b")), 6.0).commands == [c.StopWorkers(generation=1, agents=("a", "b"))]
    ended, command = stop_both(rig, 7.0)
    assert isinstance(ended, r.GenerationEnded) and ended.iteration == 1
    assert command == persist(1, ((0, "a"),), world_size=2)
    found = stored(0, 1)
    decided = rig.feed(checkpoint_of(1, found), 8.0)
    assert decided.records[0] == committed(found, 8.0)
    assert isinstance(decided.records[1], r.GenerationStarted) and decided.records[1].checkpoint == found.name


def test_another_rank_stands_in_for_the_report_of_a_dead_rank_0() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(whole(1, 5.0, 1), 5.0)
    rig.feed(exited(died(0)), 6.0)
    missing, ended, command = stop_both(rig, 7.0)
    assert missing == reported(1, 5.0, checkpoint=True)
    assert isinstance(ended, r.GenerationEnded) and ended.iteration == 1
    assert command == persist(1, ((1, "b"),), world_size=2)


def test_a_checkpoint_is_given_up_where_reports_of_rank_0_are_unknown() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(report(1, 4.0, rank=1), 4.0)
    rig.feed(whole(2, 5.0, 1), 5.0)
    rig.feed(exited(died(0)), 6.0)
    _, given_up, *_ = stop_both(rig, 7.0)
    assert isinstance(given_up, r.CheckpointAbandoned) and given_up.iteration == 2


def test_a_checkpoint_that_nobody_knows_to_be_whole_is_given_up() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(exited(died(1, agent="b")), 6.0)
    why = "the workers stopped before every rank had reported it"
    assert r.CheckpointAbandoned(at=7.0, generation=1, iteration=1, why=why) in stop_both(rig, 7.0)


def test_a_sharded_checkpoint_needs_the_part_of_every_rank_that_holds_a_shard() -> None:
    rig = running(workers=3, max_failures=2)
    rig.feed(whole(1, 5.0, 0, 0, 1), 5.0)
    rig.feed(exited(died(2)), 6.0)
    decided = rig.feed(e.WorkersStopped(generation=1, agent="a"), 7.0)
    assert isinstance(decided.records[1], r.CheckpointAbandoned)

    rig = running(workers=3, max_failures=2)
    rig.feed(whole(1, 5.0, 0, 0, 1), 5.0)
    rig.feed(report(1, 5.5, checkpoint=True, rank=1), 5.5)
    rig.feed(exited(died(2)), 6.0)
    decided = rig.feed(e.WorkersStopped(generation=1, agent="a"), 7.0)
    assert decided.commands == [persist(1, ((0, "a"), (1, "a")), world_size=3)]


def test_a_part_that_is_lost_with_its_node_is_done_without() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(whole(1, 5.0, 1), 5.0)
    rig.feed(LOST_B, 6.0)  # the only part is gone
    rig.feed(whole(1, 5.5, 0), 6.5)
    decided = rig.feed(e.WorkersStopped(generation=1, agent="a"), 7.0)
    assert decided.commands[0] == persist(1, ((0, "a"),), world_size=2)


def test_a_queued_checkpoint_outlives_a_node_whose_part_it_does_not_need() -> None:
    rig = two_nodes(max_failures=1)
    for number in (1, 2):
        rig.feed(whole(number, 5.0, 0), 5.0)
        rig.feed(whole(number, 5.0, 1), 5.0)
    assert not [one for one in rig.feed(LOST_B, 6.0).records if isinstance(one, r.CheckpointAbandoned)]
    decided = rig.feed(checkpoint_of(1, stored(0, 1)), 7.0)
    assert persist(2, ((0, "a"),), world_size=2, at_least_index=1) in decided.commands


def test_an_upload_that_loses_a_node_is_tried_again_without_its_part() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(whole(1, 5.0, 0), 5.0)
    assert rig.feed(whole(1, 5.0, 1), 5.0).commands == [persist(1, ((0, "a"), (1, "b")), world_size=2)]
    rig.feed(LOST_B, 6.0)
    decided = rig.feed(e.CheckpointFailed(ticket=TICKET, error="agent b was lost"), 7.0)
    assert not decided.records
    assert decided.commands == [persist(1, ((0, "a"),), world_size=2)]


def test_an_upload_that_storage_refused_is_not_tried_again() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(whole(1, 5.0, 0), 5.0)
    rig.feed(whole(1, 5.0, 1), 5.0)
    decided = rig.feed(e.CheckpointFailed(ticket=TICKET, error="no permission", fatal=True), 7.0)
    assert isinstance(decided.records[0], r.CheckpointAbandoned)


def test_checkpoints_in_a_row_are_all_committed_without_the_dead() -> None:
    rig = two_nodes(max_failures=1)
    rig.feed(whole(1, 5.0, 1), 5.0)
    rig.feed(whole(2, 6.0, 1), 6.0)
    rig.feed(exited(died(0)), 7.0)
    first, second, ended, command = stop_both(rig, 8.0)
    assert (first, second) == (reported(1, 5.0, checkpoint=True), reported(2, 6.0, checkpoint=True))
    assert isinstance(ended, r.GenerationEnded) and ended.iteration == 2
    assert command == persist(1, ((1, "b"),), world_size=2)
    assert (
        persist(2, ((1, "b"),), world_size=2, at_least_index=1)
        in rig.feed(checkpoint_of(1, stored(0, 1)), 9.0).commands
    )

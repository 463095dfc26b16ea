"""Retention at work: pins first, the record after the deletion, never the newest, never what workers may be loading."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.machine.rig import (
    NOTHING,
    Rig,
    began,
    checkpoint_of,
    committed,
    died,
    exited,
    joined,
    report,
    running,
    started,
    stored,
)

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import Report, StoredCheckpoint
from holdfast.core.failure_kind import FailureKind
from holdfast.core.machine import Step
from holdfast.core.retention import RetentionRule


def commit(rig: Rig, number: int, found: StoredCheckpoint, now: float) -> Step:
    rig.feed(report(number, now, checkpoint=True, generation=found.generation), now)
    return rig.feed(checkpoint_of(number, found), now)


def delete(index: int) -> c.DeleteCheckpoint:
    return c.DeleteCheckpoint(name=f"checkpoint_{index:06d}", token=f"token-{index}")


def removed(index: int, by_others: bool = False) -> e.CheckpointRemoved:
    return e.CheckpointRemoved(name=f"checkpoint_{index:06d}", token=f"token-{index}", by_others=by_others)


def kept(index: int, **how: Any) -> e.CheckpointKept:
    return e.CheckpointKept(name=f"checkpoint_{index:06d}", token=f"token-{index}", **how)


def find(*indices: int) -> c.FindPins:
    return c.FindPins(names=tuple(f"checkpoint_{index:06d}" for index in indices))


def deleted(index: int, at: float, why: str = "") -> r.CheckpointDeleted:
    return r.CheckpointDeleted(at=at, name=f"checkpoint_{index:06d}", why=why)


def two_with_one_to_go() -> Rig:
    """Checkpoint 0 is being removed since time 7."""
    rig = running(retention=RetentionRule(1))
    commit(rig, 1, stored(0, 1), 5.0)
    commit(rig, 2, stored(1, 2), 6.0)
    assert rig.feed(e.PinsFound(), 7.0) == Step([], [delete(0)])
    return rig


def test_pins_are_read_before_a_deletion_which_is_recorded_afterwards() -> None:
    rig = running(retention=RetentionRule(1))
    commit(rig, 1, stored(0, 1), 5.0)
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 2), name="checkpoint_000001", token="token-1", agents=("a",))
    assert commit(rig, 2, stored(1, 2), 6.0) == Step([committed(stored(1, 2), 6.0)], [announced, find(0, 1)])
    assert rig.feed(e.PinsFound(), 7.0) == Step([], [delete(0)])
    assert sorted(rig.state.durable.checkpoints) == ["checkpoint_000000", "checkpoint_000001"]
    assert rig.feed(removed(0), 8.0) == Step([deleted(0, 8.0)], [])
    assert rig.feed(removed(0), 9.0) == NOTHING


def test_the_best_and_the_newest_checkpoint_are_kept() -> None:
    rig = running(retention=RetentionRule(1, "loss", "min"))
    for number, loss in ((1, 5), (2, 3), (3, 9)):
        commit(rig, number, stored(number - 1, number, loss=loss), 5.0 + number)
        if rig.state.finding_pins:
            for command in rig.feed(e.PinsFound(), 5.0 + number).commands:
                assert isinstance(command, c.DeleteCheckpoint)
                rig.feed(e.CheckpointRemoved(name=command.name, token=command.token), 5.0 + number)
    assert sorted(rig.state.durable.checkpoints) == ["checkpoint_000001", "checkpoint_000002"]


def test_a_pinned_checkpoint_is_kept_and_does_not_count() -> None:
    rig = running(retention=RetentionRule(1))
    commit(rig, 1, stored(0, 1), 5.0)
    commit(rig, 2, stored(1, 2), 6.0)
    assert rig.feed(e.PinsFound(pinned=("checkpoint_000000",)), 7.0) == NOTHING
    commit(rig, 3, stored(2, 3), 8.0)
    assert rig.feed(e.PinsFound(pinned=("checkpoint_000000",)), 9.0) == Step([], [delete(1)])
    rig.feed(removed(1), 10.0)
    assert commit(rig, 4, stored(3, 4), 11.0).commands[-1] == find(0, 2, 3)
    assert rig.feed(e.PinsFound(), 12.0) == Step([], [delete(0), delete(2)])


def test_a_pin_found_by_the_removal_itself_keeps_its_checkpoint() -> None:
    rig = two_with_one_to_go()
    assert rig.feed(kept(0, pinned=True), 8.0) == NOTHING
    assert sorted(rig.state.durable.checkpoints) == ["checkpoint_000000", "checkpoint_000001"]
    assert rig.deadline is None


def test_a_checkpoint_removed_by_somebody_else_is_forgotten() -> None:
    rig = two_with_one_to_go()
    why = "somebody else removed it"
    assert rig.feed(removed(0, by_others=True), 8.0) == Step([deleted(0, 8.0, why)], [])


def test_a_failed_removal_is_reported_once_and_retried() -> None:
    rig = two_with_one_to_go()
    failed = r.RemovalFailed(at=8.0, name="checkpoint_000000", why="no answer")
    assert rig.feed(kept(0, error="no answer"), 8.0) == Step([failed], [])
    assert rig.deadline == 9.0
    assert rig.feed(e.TimePassed(), 9.0) == Step([], [find(0, 1)])
    assert rig.feed(e.PinsFound(), 14.0) == Step([], [delete(0)])
    assert rig.feed(kept(0, error="no answer"), 15.0) == NOTHING
    assert rig.deadline == 17.0
    rig.feed(e.TimePassed(), 25.0)
    assert rig.feed(e.PinsFound(), 26.0) == Step([], [delete(0)])
    assert rig.feed(removed(0), 27.0) == Step([deleted(0, 27.0)], [])
    assert rig.deadline is None


def test_leftover_files_of_a_removed_checkpoint_are_deleted_again_without_reading_pins() -> None:
    rig = two_with_one_to_go()
    failed = r.RemovalFailed(at=8.0, name="checkpoint_000000", why="no answer")
    assert rig.feed(kept(0, error="no answer", invisible=True), 8.0) == Step([failed, deleted(0, 8.0)], [])
    assert rig.feed(e.TimePassed(), 13.0) == Step([], [delete(0)])
    assert rig.feed(removed(0), 14.0) == NOTHING
    assert rig.deadline is None


def test_nothing_is_removed_while_pins_cannot_be_read() -> None:
    rig = running(retention=RetentionRule(1))
    commit(rig, 1, stored(0, 1), 5.0)
    commit(rig, 2, stored(1, 2), 6.0)
    assert rig.feed(e.PinsFound(error="no answer"), 7.0) == NOTHING
    assert rig.deadline == 8.0
    assert rig.feed(e.TimePassed(), 12.0) == Step([], [find(0, 1)])
    assert rig.feed(e.PinsFound(), 13.0) == Step([], [delete(0)])


def test_a_reused_name_waits_for_the_removal_of_its_old_checkpoint() -> None:
    rig = running(retention=RetentionRule(1))
    for number, name in ((1, "a"), (2, "b")):
        rig.feed(named(number, name), 5.0)
        found = msgspec.structs.replace(stored(number - 1, number), name=name)
        rig.feed(checkpoint_of(number, found), 5.0)
    assert rig.feed(named(3, "a"), 6.0).commands == []
    assert rig.feed(e.PinsFound(), 7.0).commands == [c.DeleteCheckpoint(name="a", token="token-0")]
    failed = e.CheckpointKept(name="a", token="token-0", error="no answer")
    assert rig.feed(failed, 8.0).commands == []
    rig.feed(e.TimePassed(), 13.0)
    rig.feed(e.PinsFound(), 14.0)
    (persist,) = rig.feed(e.CheckpointRemoved(name="a", token="token-0"), 15.0).commands
    assert isinstance(persist, c.PersistCheckpoint) and persist.name == "a"


def named(number: int, name: str) -> e.RankReported:
    item = Report(number=number, at=5.0, metrics={"loss": 1}, checkpoint=True, checkpoint_dir_name=name)
    return e.RankReported(generation=1, rank=0, reports=(item,))


def test_the_run_waits_for_the_outcome_of_removals_before_it_ends() -> None:
    rig = two_with_one_to_go()
    assert rig.feed(e.WorkerFinished(generation=1, rank=0, value=1), 8.0) == NOTHING
    decided = rig.feed(removed(0), 9.0)
    assert decided.records == [deleted(0, 9.0), r.RunFinished(at=9.0, return_value=1)]
    rig = two_with_one_to_go()
    rig.feed(e.WorkerFinished(generation=1, rank=0, value=1), 8.0)
    assert rig.feed(kept(0, error="no answer"), 9.0).records[-1] == r.RunFinished(at=9.0, return_value=1)


def test_a_stopped_or_failed_run_waits_for_removals_unless_forced() -> None:
    rig = two_with_one_to_go()
    rig.feed(e.StopRequested(why="Ctrl+C"), 8.0)
    assert rig.feed(e.WorkersStopped(generation=1, agent="a"), 9.0).commands == []
    assert rig.feed(removed(0), 10.0).commands == [c.EndRun(status=c.RunStatus.INTERRUPTED)]
    rig = two_with_one_to_go()
    rig.feed(e.StopRequested(why="Ctrl+C"), 8.0)
    assert rig.feed(e.StopRequested(why="Ctrl+C", force=True), 9.0).commands == [
        c.EndRun(status=c.RunStatus.INTERRUPTED)
    ]
    rig = two_with_one_to_go()
    rig.feed(e.StorageLost(error="full"), 8.0)
    assert rig.feed(e.WorkersStopped(generation=1, agent="a"), 9.0).commands == [c.EndRun(status=c.RunStatus.FAILED)]


def test_a_new_generation_waits_only_for_the_removal_of_what_it_would_load() -> None:
    rig = running(max_failures=2, retention=RetentionRule(1))
    commit(rig, 1, stored(0, 1), 5.0)
    commit(rig, 2, stored(1, 2), 6.0)
    rig.feed(e.PinsFound(), 7.0)
    rig.feed(exited(died(0)), 8.0)
    (start,) = rig.feed(e.WorkersStopped(generation=1, agent="a"), 9.0).commands
    assert isinstance(start, c.StartWorkers) and start.checkpoint == "checkpoint_000001"
    damage = died(0, kind=FailureKind.DAMAGED, damaged_checkpoint="checkpoint_000001")
    rig.feed(exited(damage, generation=2), 10.0)
    assert rig.feed(e.WorkersStopped(generation=2, agent="a"), 11.0).commands == []
    (start,) = rig.feed(kept(0, error="no answer"), 12.0).commands
    assert isinstance(start, c.StartWorkers) and start.checkpoint == "checkpoint_000000"


def test_the_checkpoint_that_workers_load_is_kept_until_each_has_reported() -> None:
    rig = running(workers=2, max_failures=1, retention=RetentionRule(1))
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(report(1, 5.0, rank=1), 5.0)
    rig.feed(checkpoint_of(1, stored(0, 1)), 6.0)
    rig.feed(exited(died(0)), 7.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 8.0)
    rig.feed(e.WorkersStarted(generation=2, agent="a"), 9.0)
    rig.feed(e.WorkerFinished(generation=2, rank=1), 10.0)
    rig.feed(report(1, 11.0, checkpoint=True, generation=2), 11.0)
    rig.feed(checkpoint_of(1, stored(1, 2, generation=2)), 12.0)
    assert rig.feed(e.PinsFound(), 13.0) == NOTHING
    assert sorted(rig.state.durable.checkpoints) == ["checkpoint_000000", "checkpoint_000001"]


def test_a_new_controller_applies_retention_to_what_it_finds() -> None:
    rig = Rig(workers_min=1, retention=RetentionRule(1))
    found = [stored(0, 1), stored(1, 2), stored(2, 3)]
    assert rig.feed(began(*found, pinned=("checkpoint_000001",), next_index=3), 0.0) == Step(
        [started(rig, 0.0), *(committed(one, 0.0) for one in found)],
        [delete(0), c.RequestAgents(slots=1)],
    )
    rig.feed(joined("a"), 1.0)
    rig.feed(removed(0), 2.0)
    assert sorted(rig.state.durable.checkpoints) == ["checkpoint_000001", "checkpoint_000002"]


def test_an_unrecorded_removal_by_retention_is_no_lost_checkpoint() -> None:
    rig = two_with_one_to_go()
    after = rig.next_controller()
    found = began(stored(1, 2), epoch=2, next_index=2)
    decided = after.feed(found, 20.0)
    assert decided.records == [started(after, 20.0, epoch=2), deleted(0, 20.0)]
    assert delete(0) in decided.commands, "of what it had removed something may be left"
    assert after.feed(removed(0, by_others=True), 21.0) == NOTHING
    after = rig.next_controller()
    missed = r.CheckpointDamaged(at=20.0, name="checkpoint_000001", why="it is gone from storage")
    assert after.feed(began(stored(0, 1), epoch=2, next_index=2), 20.0).records[1:] == [missed]

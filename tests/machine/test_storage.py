"""The storage fails for good: the run ends with that error, after what can be saved is saved, and harms no commit."""

from __future__ import annotations

from tests.machine.rig import checkpoint_of, persist, report, reported, running, stored

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.failure_kind import FailureKind
from holdfast.core.machine import Step

STOP = c.StopWorkers(generation=1, agents=("a",))
STOPPED = e.WorkersStopped(generation=1, agent="a")


def test_a_fatal_upload_ends_the_run_with_its_error() -> None:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    full = e.CheckpointFailed(
        ticket=e.Ticket(1, 1), error="the disk is full", kind=FailureKind.OUT_OF_SPACE, fatal=True
    )
    given_up = r.CheckpointAbandoned(at=6.0, generation=1, iteration=1, why="the disk is full")
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name=None, agents=("a",))
    assert rig.feed(full, 6.0) == Step([given_up], [announced, STOP])
    ended = r.GenerationEnded(at=7.0, generation=1, why="the disk is full", detected_at=6.0, iteration=1)
    failed = r.RunFailed(at=7.0, error="the disk is full", error_type=FailureKind.OUT_OF_SPACE)
    assert rig.feed(STOPPED, 7.0) == Step([ended, failed], [c.EndRun(status=c.RunStatus.FAILED)])


def test_the_first_fatal_error_is_reported() -> None:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(report(2, 5.5, checkpoint=True), 5.5)
    for number, text in ((1, "first"), (2, "second")):
        rig.feed(e.CheckpointFailed(ticket=e.Ticket(1, number), error=text, fatal=True), 6.0)
    assert rig.feed(STOPPED, 7.0).records[-1] == r.RunFailed(at=7.0, error="first", error_type=FailureKind.STORAGE)


def test_training_continues_while_uploads_wait() -> None:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    for number in range(2, 50):
        now = float(number + 5)
        assert rig.feed(report(number, now), now) == Step([reported(number, now)], [])


LOST = e.StorageLost(error="no space left", kind=FailureKind.OUT_OF_SPACE)


def test_a_journal_that_cannot_be_written_ends_the_run() -> None:
    rig = running()
    assert rig.feed(LOST, 6.0) == Step([], [STOP])
    late = rig.feed(report(2, 6.2, checkpoint=True), 6.2)
    assert [type(one) for one in late.commands] == [c.AnnounceCheckpoint]
    decided = rig.feed(STOPPED, 7.0)
    assert decided.records[-1] == r.RunFailed(at=7.0, error="no space left", error_type=FailureKind.OUT_OF_SPACE)
    assert decided.commands == [c.EndRun(status=c.RunStatus.FAILED)]


def test_a_checkpoint_on_its_way_to_storage_keeps_its_parts_when_the_journal_is_lost() -> None:
    rig = running()
    asked = rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    assert asked.commands == [persist(1, ((0, "a"),))]
    rig.feed(report(2, 5.5, checkpoint=True), 5.5)
    given_up = r.CheckpointAbandoned(at=6.0, generation=1, iteration=2, why="the journal could not be written")
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 2), name=None, agents=("a",))
    assert rig.feed(LOST, 6.0) == Step([given_up], [STOP, announced])
    assert rig.feed(STOPPED, 7.0).commands == []
    decided = rig.feed(checkpoint_of(1, stored(0, 1)), 8.0)
    assert isinstance(decided.records[0], r.CheckpointCommitted)
    assert decided.commands[-1] == c.EndRun(status=c.RunStatus.FAILED)

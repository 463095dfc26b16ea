"""Validation of checkpoints: due when committed, one at a time, never fatal, and resumed by the next controller."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.machine.rig import NOTHING, Rig, began, checkpoint_of, committed, joined, running, stored

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import Report, StoredCheckpoint, Validation, ValidationStatus, ValidationTask
from holdfast.core.machine import Step
from holdfast.core.retention import RetentionRule

TASK = ValidationTask(fn_kwargs={"split": "test"}, timeout_s=5.0)


def ask(number: int, at: float) -> e.RankReported:
    item = Report(number=number, at=at, metrics={"loss": number}, checkpoint=True, validation=TASK)
    return e.RankReported(generation=1, rank=0, reports=(item,))


def run_of(found: StoredCheckpoint) -> c.RunValidation:
    return c.RunValidation(name=found.name, token=found.token, task=TASK)


def ended(found: StoredCheckpoint, **outcome: Any) -> e.ValidationFinished:
    outcome.setdefault("status", ValidationStatus.VALIDATED)
    return e.ValidationFinished(name=found.name, token=found.token, **outcome)


def validated(found: StoredCheckpoint, at: float, **outcome: Any) -> r.CheckpointValidated:
    outcome.setdefault("status", ValidationStatus.VALIDATED)
    return r.CheckpointValidated(at=at, name=found.name, token=found.token, **outcome)


def with_two(**settings: Any) -> Rig:
    """Two checkpoints are committed and due, and the first is being validated."""
    rig = running(has_validation=True, **settings)
    for number in (1, 2):
        rig.feed(ask(number, 4.0), 4.0)
        rig.feed(checkpoint_of(number, stored(number - 1, number)), 5.0)
    return rig


def test_a_validation_is_recorded_before_the_commit_and_run_after_it() -> None:
    rig = running(has_validation=True)
    asked = rig.feed(ask(1, 4.0), 4.0)
    assert asked.records[1:] == [r.ValidationRequested(at=4.0, generation=1, iteration=1, task=TASK)]
    assert [type(one) for one in asked.commands] == [c.PersistCheckpoint]
    found = stored(0, 1)
    done = rig.feed(checkpoint_of(1, found), 5.0)
    assert done.records == [committed(found, 5.0)]
    assert done.commands[-1] == run_of(found)


def test_its_metrics_join_those_of_the_checkpoint() -> None:
    rig = running(has_validation=True)
    rig.feed(ask(1, 4.0), 4.0)
    found = stored(0, 1)
    rig.feed(checkpoint_of(1, found), 5.0)
    assert rig.feed(ended(found, metrics={"score": 7}), 6.0) == Step([validated(found, 6.0, metrics={"score": 7})], [])
    assert rig.state.durable.checkpoints[found.name].metrics == {"loss": 1, "score": 7}
    later = rig.next_controller()
    later.feed(began(found, epoch=2), 7.0)
    assert later.state.durable.checkpoints[found.name].metrics == {"loss": 1, "score": 7}


def test_one_is_validated_at_a_time_and_the_oldest_first() -> None:
    rig = with_two()
    first, second = stored(0, 1), stored(1, 2)
    assert rig.state.validating == (first.name, first.token)
    assert rig.feed(ended(second), 6.0) == NOTHING
    assert rig.feed(ended(first), 6.0) == Step([validated(first, 6.0)], [run_of(second)])


def test_a_validation_that_fails_does_not_fail_the_run() -> None:
    rig = with_two()
    first, second = stored(0, 1), stored(1, 2)
    outcome: dict[str, Any] = {"status": ValidationStatus.FAILED, "error": "raised ValueError: no"}
    assert rig.feed(ended(first, **outcome), 6.0) == Step([validated(first, 6.0, **outcome)], [run_of(second)])
    rig.feed(ended(second, status=ValidationStatus.TIMEOUT), 7.0)
    done = rig.feed(e.WorkerFinished(generation=1, rank=0), 8.0)
    assert done.commands == [c.EndRun(status=c.RunStatus.FINISHED)]


def test_the_run_finishes_after_the_last_validation() -> None:
    rig = with_two()
    assert rig.feed(e.WorkerFinished(generation=1, rank=0), 6.0) == NOTHING
    rig.feed(ended(stored(0, 1)), 7.0)
    last = rig.feed(ended(stored(1, 2)), 8.0)
    assert last == Step([validated(stored(1, 2), 8.0), r.RunFinished(at=8.0)], [c.EndRun(status=c.RunStatus.FINISHED)])


def test_the_next_controller_runs_what_is_due() -> None:
    rig = with_two()
    rig.feed(ended(stored(0, 1)), 6.0)
    later = rig.next_controller()
    assert run_of(stored(1, 2)) in later.feed(began(stored(0, 1), stored(1, 2), epoch=2), 7.0).commands


def test_a_commit_that_only_storage_knows_of_is_validated() -> None:
    rig = running(has_validation=True)
    rig.feed(ask(1, 4.0), 4.0)  # the controller dies after the manifest, and before the record of the commit
    later = rig.next_controller()
    assert run_of(stored(0, 1)) in later.feed(began(stored(0, 1), epoch=2), 7.0).commands


def test_a_commit_that_failed_for_its_controller_but_is_in_storage_is_validated() -> None:
    rig = running(has_validation=True)
    rig.feed(ask(1, 4.0), 4.0)
    rig.feed(e.CheckpointFailed(ticket=e.Ticket(1, 1), error="no answer", fatal=True), 5.0)
    assert any(isinstance(one, r.CheckpointAbandoned) for one in rig.journal)
    later = rig.next_controller()
    assert run_of(stored(0, 1)) in later.feed(began(stored(0, 1), epoch=2), 7.0).commands


def test_without_a_function_nothing_is_validated_and_nothing_waited_for() -> None:
    rig = with_two()
    spec = msgspec.structs.replace(rig.spec, has_validation=False)
    later = Rig(spec, rig.journal)
    begun = later.feed(began(stored(0, 1), stored(1, 2), epoch=2), 7.0)
    assert not [one for one in begun.commands if isinstance(one, c.RunValidation)]
    assert later.feed(joined("a"), 8.0).records


def test_retention_keeps_what_is_due_and_counts_what_was_found() -> None:
    rule = RetentionRule(1, "score", "max")
    rig = with_two(retention=rule)
    first, second = stored(0, 1), stored(1, 2)
    assert not rig.state.removals and not rig.state.finding_pins
    rig.feed(ended(first, metrics={"score": 9}), 6.0)
    rig.feed(ended(second, metrics={"score": 1}), 7.0)
    assert not rig.state.finding_pins  # the first is the best, the second the newest
    third = stored(2, 3)
    rig.feed(e.RankReported(generation=1, rank=0, reports=(Report(number=3, at=8.0, checkpoint=True),)), 8.0)
    rig.feed(checkpoint_of(3, third), 8.0)
    removed = rig.feed(e.PinsFound(), 9.0)
    assert removed.commands == [c.DeleteCheckpoint(name=second.name, token=second.token)]


def test_ranks_may_wait_for_validations() -> None:
    rig = with_two()
    question = e.WorkerWaited(generation=1, rank=0, waiting=True, until_report=2, until_validated=True)
    (told,) = rig.feed(question, 6.0).commands
    assert (
        isinstance(told, c.AnnounceSettled)
        and not told.settled
        and set(told.validations)
        == {
            "checkpoint_000000",
            "checkpoint_000001",
        }
    )
    rig.feed(ended(stored(0, 1)), 7.0)
    last = rig.feed(ended(stored(1, 2), metrics={"score": 1}), 8.0).commands[-1]
    assert isinstance(last, c.AnnounceSettled) and last.settled
    assert last.validations["checkpoint_000001"] == Validation(
        token="token-1", task=TASK, status=ValidationStatus.VALIDATED, metrics={"score": 1}
    )


def test_a_run_that_must_stop_begins_no_validation() -> None:
    rig = with_two(max_failures=0)
    rig.feed(e.StopRequested(why="Ctrl+C"), 6.0)
    assert rig.feed(ended(stored(0, 1)), 7.0) == Step([validated(stored(0, 1), 7.0)], [])


def test_a_run_that_is_to_stop_and_has_only_validations_left_stops_at_once() -> None:
    rig = with_two()
    rig.state.checkpoint_interval.ask(3, 0, 5.5)
    rig.feed(e.WorkerFinished(generation=1, rank=0), 6.0)
    assert rig.feed(e.StopRequested(why="Ctrl+C", grace_s=20.0), 6.5).commands == []
    done = rig.feed(ended(stored(0, 1)), 7.0)
    assert [type(one) for one in done.commands] == [c.StopWorkers], "the second is left for the next controller"

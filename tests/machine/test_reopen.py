"""A finished run is called again when its script changed or when a restart is asked for, and only then."""

from __future__ import annotations

from tests.machine.rig import Rig, began, checkpoint_of, died, exited, joined, report, running, started, stored

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.curve import effective_reports
from holdfast.core.machine import Step
from holdfast.core.summary import summarize
from holdfast.views.narrative import narrate

_CHANGED = ("`EPOCHS` was 2 and is 3",)


def finished_run() -> Rig:
    """Two reports with a checkpoint at the first, then the end."""
    rig = running(max_failures=1)
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(checkpoint_of(1, stored(0, 1)), 6.0)
    rig.feed(report(2, 7.0), 7.0)
    decided = rig.feed(e.WorkerFinished(generation=1, rank=0, value=2), 8.0)
    assert decided.commands == [c.EndRun(status=c.RunStatus.FINISHED)]
    return rig


def test_a_finished_run_whose_script_is_the_same_ends_at_once() -> None:
    rig = finished_run().next_controller()
    assert rig.feed(began(stored(0, 1), epoch=2), 20.0) == Step([], [c.EndRun(status=c.RunStatus.FINISHED)])


def test_a_finished_run_whose_script_changed_goes_on_from_its_newest_checkpoint() -> None:
    rig = finished_run().next_controller()
    decided = rig.feed(began(stored(0, 1), epoch=2, changes=_CHANGED), 20.0)
    reopened = r.ControllerStarted(at=20.0, epoch=2, host="head", pid=102, workers=1, changes=_CHANGED)
    assert decided == Step([reopened], [c.RequestAgents(slots=1)])
    assert rig.state.durable.outcome is None
    rig.feed(joined("b"), 21.0)
    assert rig.feed(e.AgentPrepared(agent="b"), 22.0).records == [
        r.GenerationStarted(
            at=22.0, generation=2, world_size=1, agents=("b",), iteration=1, checkpoint="checkpoint_000000"
        )
    ]
    rig.feed(e.WorkersStarted(generation=2, agent="b"), 23.0)
    rig.feed(report(1, 24.0, generation=2), 24.0)
    rig.feed(report(2, 25.0, generation=2), 25.0)
    rig.feed(e.WorkerFinished(generation=2, rank=0, value=3), 26.0)
    assert rig.state.durable.outcome == r.RunFinished(at=26.0, return_value=3)
    assert [row.iteration for row in effective_reports(rig.journal)] == [1, 2, 3]
    text = "\n".join(narrate(rig.journal))
    assert "was complete, and was called again" in text and "`EPOCHS` was 2 and is 3" in text


def test_a_reopened_run_has_its_whole_budget_of_failures() -> None:
    rig = running(max_failures=1)
    rig.feed(exited(died(0)), 5.0)
    rig.feed(e.WorkersStopped(generation=1, agent="a"), 6.0)
    rig.feed(e.WorkersStarted(generation=2, agent="a"), 7.0)
    rig.feed(e.WorkerFinished(generation=2, rank=0), 8.0)
    again = rig.next_controller()
    assert again.state.durable.failures == 1
    again.feed(began(epoch=2, changes=_CHANGED), 20.0)
    assert again.state.durable.failures == 0


def test_a_restart_starts_without_a_checkpoint_and_goes_on_counting_indices() -> None:
    rig = finished_run().next_controller()
    decided = rig.feed(began(stored(0, 1), epoch=2, next_index=1, restart=True), 20.0)
    assert decided == Step(
        [started(rig, 20.0, epoch=2), r.RunRestarted(at=20.0, first_index=1)], [c.RequestAgents(slots=1)]
    )
    rig.feed(joined("b"), 21.0)
    assert rig.feed(e.AgentPrepared(agent="b"), 22.0).records == [
        r.GenerationStarted(at=22.0, generation=2, world_size=1, agents=("b",), iteration=0)
    ]
    rig.feed(e.WorkersStarted(generation=2, agent="b"), 23.0)
    decided = rig.feed(report(1, 24.0, checkpoint=True, generation=2), 24.0)
    assert [one.at_least_index for one in decided.commands if isinstance(one, c.PersistCheckpoint)] == [1]
    rig.feed(checkpoint_of(1, stored(1, 1, generation=2)), 25.0)
    newest = rig.state.durable.resume_point()
    assert newest is not None and newest.index == 1


def test_after_a_restart_no_controller_goes_back_to_a_checkpoint_from_before_it() -> None:
    rig = finished_run().next_controller()
    rig.feed(began(stored(0, 1), epoch=2, next_index=1, restart=True), 20.0)
    after_crash = rig.next_controller()
    after_crash.feed(began(stored(0, 1), epoch=3, next_index=1), 30.0)
    assert after_crash.state.durable.resume_point() is None
    assert list(after_crash.state.durable.checkpoints) == ["checkpoint_000000"], "it is kept all the same"


def test_a_restart_without_an_earlier_run_writes_no_record() -> None:
    rig = Rig()
    decided = rig.feed(began(restart=True), 1.0)
    assert decided.records == [started(rig, 1.0)]


def test_training_from_before_a_restart_counts_as_kept_and_its_curve_is_left_out() -> None:
    rig = finished_run()
    before = summarize(rig.journal).account
    again = rig.next_controller()
    again.feed(began(stored(0, 1), epoch=2, next_index=1, restart=True), 20.0)
    again.feed(joined("b"), 21.0)
    again.feed(e.AgentPrepared(agent="b"), 22.0)
    again.feed(e.WorkersStarted(generation=2, agent="b"), 23.0)
    again.feed(report(1, 24.0, generation=2), 24.0)
    after = summarize(again.journal).account
    assert after.training_kept_s == before.training_kept_s + 1.0
    assert after.training_lost_s == before.training_lost_s
    assert after.lost_iterations == 0
    assert [(row.iteration, row.generation) for row in effective_reports(again.journal)] == [(1, 2)]
    text = "\n".join(narrate(again.journal))
    assert "starts from the beginning" in text and "done again" not in text

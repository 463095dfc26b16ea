"""The user stops the run: workers first, then what they had reported, then the end; by force, the end at once."""

from __future__ import annotations

from tests.machine.rig import (
    NOTHING,
    Rig,
    began,
    checkpoint_of,
    committed,
    died,
    exited,
    report,
    running,
    started,
    stored,
)

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import Report
from holdfast.core.machine import Step

CTRL_C = e.StopRequested(why="Ctrl+C")
STOP = c.StopWorkers(generation=1, agents=("a",))
STOPPED = e.WorkersStopped(generation=1, agent="a")


def stopped(at: float, iteration: int) -> r.GenerationEnded:
    return r.GenerationEnded(at=at, generation=1, why="Ctrl+C", detected_at=10.0, iteration=iteration)


def test_a_stop_request_counts_no_failure() -> None:
    rig = running()
    rig.feed(report(1, 5.0), 5.0)
    assert rig.feed(CTRL_C, 10.0) == Step([], [STOP])
    assert rig.feed(CTRL_C, 10.5) == NOTHING
    interrupted = r.RunInterrupted(at=11.0, why="Ctrl+C")
    assert rig.feed(STOPPED, 11.0) == Step([stopped(11.0, 1), interrupted], [c.EndRun(status=c.RunStatus.INTERRUPTED)])
    assert rig.state.durable.failures == 0


def test_reported_checkpoints_are_committed_before_a_stop_completes() -> None:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(CTRL_C, 10.0)
    assert rig.feed(STOPPED, 11.0) == Step([stopped(11.0, 1)], [])
    found = stored(0, 1)
    announced = c.AnnounceCheckpoint(ticket=e.Ticket(1, 1), name=found.name, token=found.token, agents=("a",))
    assert rig.feed(checkpoint_of(1, found), 12.0) == Step(
        [committed(found, 12.0), r.RunInterrupted(at=12.0, why="Ctrl+C")],
        [announced, c.EndRun(status=c.RunStatus.INTERRUPTED)],
    )


def test_a_forced_stop_waits_for_nothing() -> None:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    rig.feed(CTRL_C, 10.0)
    forced = rig.feed(e.StopRequested(why="SIGTERM", force=True), 10.1)
    assert forced == Step([r.RunInterrupted(at=10.1, why="Ctrl+C")], [c.EndRun(status=c.RunStatus.INTERRUPTED)])
    assert rig.feed(STOPPED, 11.0) == NOTHING
    assert rig.feed(checkpoint_of(1, stored(0, 1)), 12.0) == NOTHING


def test_a_worker_killed_by_a_stop_is_no_failure() -> None:
    rig = running()
    rig.feed(CTRL_C, 10.0)
    assert rig.feed(exited(died(0)), 10.1) == NOTHING
    assert rig.feed(STOPPED, 11.0).records[0] == stopped(11.0, 0)


def test_a_stop_while_waiting_for_agents_ends_at_once() -> None:
    rig = Rig(workers_min=1)
    rig.feed(began(), 0.0)
    decided = rig.feed(CTRL_C, 1.0)
    assert decided == Step([r.RunInterrupted(at=1.0, why="Ctrl+C")], [c.EndRun(status=c.RunStatus.INTERRUPTED)])


def test_a_stopped_run_can_be_resumed() -> None:
    rig = running(max_failures=0)
    rig.feed(CTRL_C, 10.0)
    rig.feed(STOPPED, 11.0)
    again = rig.next_controller()
    decided = again.feed(began(epoch=2), 20.0)
    assert decided == Step([started(again, 20.0, epoch=2)], [c.RequestAgents(slots=1)])


GRACE = e.StopRequested(why="Ctrl+C", grace_s=20.0)


def _asks(rig: Rig) -> None:
    """The function asks `should_checkpoint`."""
    rig.state.checkpoint_interval.ask(1, 0, 9.0)


def _held(number: int, at: float) -> e.RankReported:
    """Rank 0 stays in a report with a checkpoint."""
    one = Report(number=number, at=at, metrics={"loss": number}, checkpoint=True, held=True)
    return e.RankReported(generation=1, rank=0, reports=(one,))


def test_a_function_that_asks_is_stopped_at_the_commit_of_a_last_checkpoint() -> None:
    rig = running()
    _asks(rig)
    why = "Ctrl+C (waited for 20 s at most; a second time stops at once)"
    planned = r.ChangePlanned(at=10.0, generation=1, why=why)
    assert rig.feed(GRACE, 10.0) == Step([planned], [c.HoldReports(generation=1, number=0, agents=("a",))])
    assert rig.deadline == 30.0
    rig.feed(_held(1, 11.0), 11.0)
    found = stored(0, 1)
    decided = rig.feed(checkpoint_of(1, found), 12.0)
    assert decided.records == [committed(found, 12.0)] and STOP in decided.commands
    ended = r.GenerationEnded(at=13.0, generation=1, why="Ctrl+C", detected_at=12.0, iteration=1)
    assert rig.feed(STOPPED, 13.0).records == [ended, r.RunInterrupted(at=13.0, why="Ctrl+C")]


def test_a_last_checkpoint_that_does_not_come_is_waited_for_no_longer_than_the_grace_period() -> None:
    rig = running()
    _asks(rig)
    rig.feed(GRACE, 10.0)
    assert not rig.feed(e.TimePassed(), 29.9).commands
    assert rig.feed(e.TimePassed(), 30.0) == Step([], [STOP])


def test_a_second_stop_ends_the_grace_period() -> None:
    rig = running()
    _asks(rig)
    rig.feed(GRACE, 10.0)
    forced = rig.feed(e.StopRequested(why="Ctrl+C", force=True, grace_s=20.0), 10.1)
    assert forced.commands == [c.EndRun(status=c.RunStatus.INTERRUPTED)]


def test_a_function_that_does_not_ask_is_waited_for_twice_the_time_between_its_checkpoints() -> None:
    for now, until in ((9.0, 11.0), (12.0, None)):  # checkpoints at 5 and 7
        rig = running()
        for number, at in ((1, 5.0), (2, 7.0)):
            rig.feed(report(number, at, checkpoint=True), at)
            rig.feed(checkpoint_of(number, stored(number - 1, number)), at)
        decided = rig.feed(GRACE, now)
        assert (STOP in decided.commands) == (until is None)
        if until is not None:
            assert rig.deadline == until and rig.feed(e.TimePassed(), until).commands == [STOP]


def test_without_a_checkpoint_to_be_expected_a_stop_is_immediate() -> None:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    assert rig.feed(GRACE, 10.0).commands == [STOP]
    rare = running()
    for number, at in ((1, 100.0), (2, 200.0)):
        rare.feed(report(number, at, checkpoint=True), at)
        rare.feed(checkpoint_of(number, stored(number - 1, number)), at)
    assert rare.feed(GRACE, 250.0).commands == [STOP]


def test_a_function_that_returns_within_the_grace_period_has_finished() -> None:
    rig = running()
    _asks(rig)
    rig.feed(GRACE, 10.0)
    assert isinstance(rig.feed(e.WorkerFinished(generation=1, rank=0), 11.0).records[-1], r.RunFinished)

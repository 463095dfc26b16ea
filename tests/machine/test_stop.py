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

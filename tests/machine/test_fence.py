"""Another controller took over: this one ends at once and writes nothing more."""

from __future__ import annotations

import pytest
from tests.machine.rig import NOTHING, Rig, began, died, exited, report, running

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.machine import Step

FENCED = e.ControllerFenced(why="the run was taken over by other:7")
END = Step([], [c.EndRun(status=c.RunStatus.FENCED)])


def idle() -> Rig:
    rig = Rig(workers_min=1)
    rig.feed(began(), 0.0)
    return rig


def uploading() -> Rig:
    rig = running()
    rig.feed(report(1, 5.0, checkpoint=True), 5.0)
    return rig


def failing() -> Rig:
    rig = running(max_failures=1)
    rig.feed(exited(died(0)), 5.0)
    return rig


def catching_up() -> Rig:
    """One rank raised after a report that the other is about to make."""
    rig = running(workers=2, max_failures=1)
    rig.feed(report(1, 4.5, rank=1), 4.5)
    rig.feed(exited(died(1, "raised ValueError: bad", error_type="ValueError", error="bad")), 5.0)
    return rig


def stopping() -> Rig:
    rig = running()
    rig.feed(e.StopRequested(why="Ctrl+C"), 5.0)
    return rig


@pytest.mark.parametrize("state", [idle, running, uploading, failing, catching_up, stopping])
def test_a_fenced_controller_decides_nothing_more(state: object) -> None:
    assert callable(state)
    rig = state()
    assert rig.feed(FENCED, 10.0) == END
    assert rig.state.fatal == ("Fenced", "the run was taken over by other:7")
    assert rig.deadline is None
    for late in (e.WorkersStopped(generation=1, agent="a"), report(2, 11.0), e.TimePassed(), FENCED):
        assert rig.feed(late, 11.0) == NOTHING


def test_a_controller_may_be_fenced_before_it_began() -> None:
    rig = Rig(workers_min=1)
    assert rig.feed(FENCED, 0.0) == END
    assert rig.feed(began(), 1.0) == NOTHING

"""An exception that comes twice in the same way ends the run before the budget is burnt; trouble of a node does not."""

from __future__ import annotations

import pytest
from tests.machine.rig import Rig, checkpoint_of, died, exited, report, running, stored

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r

TRACE = 'Traceback (most recent call last):\n  File "train.py", line {}, in step\n    x\nKeyError: {}\n'


def raised(error: str = "'label'", line: int = 3, error_type: str = "KeyError") -> r.WorkerFailure:
    trace = TRACE.format(line, error)
    return died(0, f"raised {error_type}: {error}", error_type=error_type, error=error, traceback=trace)


def fail(rig: Rig, at: float, failure: r.WorkerFailure, reports: int = 2) -> list[r.Record]:
    """The current generation makes so many reports and fails like this; the next one runs, if there is one."""
    number = rig.state.durable.generation
    for one in range(1, reports + 1):
        rig.feed(report(one, at, generation=number), at)
    rig.feed(exited(failure, generation=number), at)
    records = rig.stopped(number, "a", at + 1).records
    if rig.state.generation is None and not rig.state.ended:
        records += rig.feed(e.TimePassed(), at + 90).records
    if rig.state.generation is not None:
        rig.feed(e.WorkersStarted(generation=number + 1, agent="a"), at + 91)
    return records


def test_the_same_error_at_the_same_line_and_step_twice_ends_the_run() -> None:
    rig = running(max_failures=-1)
    assert isinstance(fail(rig, 10.0, raised())[-1], r.GenerationStarted)
    *_, failed = fail(rig, 200.0, raised())
    assert isinstance(failed, r.RunFailed)
    assert failed.error.startswith("rank 0 raised KeyError: 'label' (the same error at the same line")
    assert rig.state.ended


@pytest.mark.parametrize(
    "second",
    [raised(error="'other'"), raised(line=4), raised(error_type="ValueError")],
    ids=["message", "line", "class"],
)
def test_another_error_is_tried_again(second: r.WorkerFailure) -> None:
    rig = running(max_failures=-1)
    fail(rig, 10.0, raised())
    assert isinstance(fail(rig, 200.0, second)[-1], r.GenerationStarted)


def test_the_same_error_at_another_step_is_tried_again() -> None:
    rig = running(max_failures=-1)
    fail(rig, 10.0, raised(), reports=2)
    assert isinstance(fail(rig, 200.0, raised(), reports=3)[-1], r.GenerationStarted)


def test_a_commit_in_between_is_progress() -> None:
    rig = running(max_failures=-1)
    fail(rig, 10.0, raised(), reports=2)
    rig.feed(report(1, 150.0, checkpoint=True, generation=2), 150.0)
    rig.feed(checkpoint_of(1, stored(0, 1, generation=2)), 151.0)
    assert isinstance(fail(rig, 200.0, raised(), reports=2)[-1], r.GenerationStarted)


@pytest.mark.parametrize(
    "failure",
    [
        died(0, "was killed by SIGKILL"),
        raised(error_type="OSError", error="[Errno 5] Input/output error"),
        raised(error_type="torch.OutOfMemoryError", error="CUDA out of memory"),
        raised(error_type="requests.exceptions.ConnectionError", error="no route"),
        raised(error_type="RuntimeError", error="CUDA error: uncorrectable ECC error"),
        died(0, "raised KeyError: 'x'", error_type="KeyError", error="'x'"),
    ],
    ids=["signal", "disk", "memory", "network", "device", "no line"],
)
def test_what_may_be_the_machines_fault_is_tried_again(failure: r.WorkerFailure) -> None:
    rig = running(max_failures=-1)
    for at in (10.0, 200.0, 400.0):
        assert isinstance(fail(rig, at, failure)[-1], r.GenerationStarted)


def test_the_rule_can_be_switched_off() -> None:
    rig = running(max_failures=-1, stop_on_repeated_error=False)
    for at in (10.0, 200.0, 400.0):
        assert isinstance(fail(rig, at, raised())[-1], r.GenerationStarted)


def test_a_new_controller_remembers_the_first_time_and_a_new_try_does_not() -> None:
    rig = running(max_failures=-1)
    fail(rig, 10.0, raised())
    assert rig.next_controller().state.durable.bug_count == 1
    fail(rig, 200.0, raised())
    again = rig.next_controller()
    again.feed(e.ControllerBegan(epoch=2, host="head", pid=7), 300.0)
    assert again.state.durable.bug_count == 0
    assert not [one for one in again.journal if isinstance(one, c.EndRun)]

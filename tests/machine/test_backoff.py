"""A run that fails the same way again and again without progress waits longer each time."""

from __future__ import annotations

import pytest
from tests.machine.rig import NOTHING, Rig, checkpoint_of, died, exited, report, running, stored

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.backoff import backoff_s


def fail(rig: Rig, now: float, cause: str = "was killed by SIGKILL") -> list[c.Command]:
    """Kill the present generation; what its end leads to at once, but for what becomes of its host."""
    generation = rig.state.durable.generation
    rig.feed(exited(died(0, cause), generation), now)
    commands = rig.stopped(generation, "a", now).commands
    return [one for one in commands if not isinstance(one, c.SetHostAside)]


def has_started(commands: list[c.Command]) -> bool:
    return [type(one) for one in commands] == [c.StartWorkers]


def test_the_wait_doubles_up_to_its_limit() -> None:
    assert [backoff_s(failures, 0.5, 3.0) for failures in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff_s(10_000, 0.5, 3.0) == 3.0


def test_only_a_repeated_failure_backs_off() -> None:
    rig = running(max_failures=-1)
    assert has_started(fail(rig, 10.0))
    assert fail(rig, 20.0) == []
    assert rig.deadline == 21.0
    assert rig.feed(e.AgentPrepared(agent="a"), 20.5) == NOTHING
    assert has_started(rig.feed(e.TimePassed(), 21.0).commands)
    assert fail(rig, 30.0) == []
    assert rig.deadline == 32.0


def test_a_different_failure_resets_the_back_off() -> None:
    rig = running(max_failures=-1)
    fail(rig, 10.0)
    assert has_started(fail(rig, 20.0, "raised ValueError"))
    assert fail(rig, 30.0, "raised ValueError") == []


def test_a_commit_resets_the_back_off() -> None:
    rig = running(max_failures=-1)
    fail(rig, 10.0)
    rig.feed(report(1, 11.0, checkpoint=True, generation=2), 11.0)
    rig.feed(checkpoint_of(1, stored(0, 1, generation=2)), 12.0)
    assert has_started(fail(rig, 20.0))


def test_the_same_error_class_with_another_message_is_the_same_failure() -> None:
    rig = running(max_failures=-1)
    traceback = 'Traceback (most recent call last):\n  File "train.py", line 3, in step\nValueError: {}\n'
    for now, (text, waits) in enumerate([("loss is 3", False), ("loss is 4", True)]):
        generation = rig.state.durable.generation
        failure = died(0, f"raised {text}", error_type="ValueError", error=text, traceback=traceback.format(text))
        rig.feed(exited(failure, generation), 10.0 * now + 10)
        decided = rig.feed(e.WorkersStopped(generation=generation, agent="a"), 10.0 * now + 10)
        assert has_started(decided.commands) is not waits


@pytest.mark.parametrize("forced", [True, False])
def test_a_stop_request_ends_the_back_off(forced: bool) -> None:
    rig = running(max_failures=-1)
    fail(rig, 10.0)
    fail(rig, 20.0)
    decided = rig.feed(e.StopRequested(why="Ctrl+C", force=forced), 20.1)
    assert decided.commands == [c.EndRun(status=c.RunStatus.INTERRUPTED)]
    assert rig.deadline is None

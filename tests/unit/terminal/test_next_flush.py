"""The terminal says when it has something to show although nothing more comes, and otherwise sleeps."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.terminal.screen import Screen

from holdfast.core import records as r
from holdfast.core.records import Reported


def _report(iteration: int, checkpoint: bool = False) -> Reported:
    return Reported(at=float(iteration), generation=1, iteration=iteration, metrics={}, checkpoint=checkpoint)


def test_with_nothing_held_back_it_sleeps() -> None:
    screen = Screen()
    assert screen.terminal.next_flush_s is None
    screen.feed([_report(1)])
    assert screen.terminal.next_flush_s is None


def test_a_report_that_waits_for_the_name_of_its_checkpoint_is_due_soon() -> None:
    screen = Screen()
    screen.feed([_report(1, checkpoint=True)])
    assert screen.terminal.next_flush_s == 0.2
    assert "1" in screen.flush()
    assert screen.terminal.next_flush_s is None


def test_reports_that_are_passed_over_are_due_soon() -> None:
    screen = Screen()
    screen.feed([_report(n) for n in range(1, 40)], gap_s=0.001)
    assert screen.terminal.next_flush_s == 0.2
    screen.flush(after_s=2.0)
    assert screen.terminal.next_flush_s is None


def test_a_line_that_waits_for_other_ranks_is_due_soon() -> None:
    screen = Screen()
    started = r.GenerationStarted(at=1.0, generation=1, world_size=2, agents=("a",), checkpoint=None, iteration=0)
    screen.feed([started])
    screen.say((0, "hello"))
    assert screen.terminal.next_flush_s == 0.2
    assert "hello" in screen.flush()
    assert screen.terminal.next_flush_s is None


def test_what_the_run_waits_for_is_asked_when_it_is_to_be_told_again() -> None:
    """Ever more rarely: a thousand runs may wait in one driver."""
    screen = Screen()
    waiting = ["an agent"]
    screen.terminal.waiting_for = lambda: waiting[0]
    assert screen.terminal.next_flush_s == 0.2
    pauses = []
    screen.flush()
    for _ in range(3):
        pauses.append(screen.terminal.next_flush_s)
        assert screen.terminal.next_flush_s is not None
        assert "Waiting for an agent" in screen.flush(after_s=screen.terminal.next_flush_s)
    assert pauses == [5.0, 5.0, 10.0]
    waiting[0] = ""
    assert screen.terminal.next_flush_s is None


def test_what_the_run_waits_for_is_drawn_as_often_as_its_clock_changes() -> None:
    screen = Screen(interactive=True)
    screen.terminal.waiting_for = lambda: "an agent"
    screen.feed([_report(1)])
    assert "waiting for an agent" in screen.flush()
    assert screen.terminal.next_flush_s == 1.0


@pytest.mark.parametrize("options", [{"quiet": True}, {"json_lines": True}])
def test_who_does_not_show_what_the_run_waits_for_is_not_woken_for_it(options: dict[str, Any]) -> None:
    screen = Screen(**options)
    screen.terminal.waiting_for = lambda: "an agent"
    assert screen.terminal.next_flush_s is None


def test_a_live_line_is_drawn_at_once_and_then_as_often_as_its_clocks_change() -> None:
    screen = Screen(interactive=True)
    screen.feed([_report(1), _report(2)], gap_s=0.01)
    assert screen.terminal.next_flush_s == 0.2, "the second report is not shown yet"
    screen.flush(after_s=0.2)
    assert screen.terminal.next_flush_s == 1.0


def test_a_quiet_terminal_sleeps() -> None:
    screen = Screen(interactive=True, quiet=True)
    screen.feed([_report(1)])
    assert screen.terminal.next_flush_s is None

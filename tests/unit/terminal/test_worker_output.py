"""Worker output on the terminal: rank prefixes, folding of equal lines, no cursor movement."""

from __future__ import annotations

import io

import pytest
from tests.unit.files.shown import T0, begin
from tests.unit.terminal.screen import Screen

from holdfast.core import records as r
from holdfast.wire.messages import LogLine


def _running(interactive: bool = False) -> Screen:
    """Four ranks on two hosts."""
    screen = Screen(interactive=interactive)
    agents = [r.AgentAdded(at=T0, agent=name, host=f"node-{name}", slots=2) for name in ("a", "b")]
    started = r.GenerationStarted(at=T0, generation=1, world_size=4, agents=("a", "b"), iteration=0)
    screen.feed([begin(), *agents, started])
    return screen


def test_a_line_says_who_printed_it() -> None:
    screen = _running()
    assert screen.say((0, "one"), (1, "two"), (2, "three"), (9, "four")) == "", "others may print the same"
    assert screen.flush(0.2) == "(rank 0, node-a) one\n(rank 1, node-a) two\n(rank 2, node-b) three\n(rank 9) four\n"


def test_on_one_host_it_need_not_be_named() -> None:
    screen = Screen()
    agent = r.AgentAdded(at=T0, agent="a", host="node-a", slots=2)
    screen.feed([begin(), agent, r.GenerationStarted(at=T0, generation=1, world_size=2, agents=("a",), iteration=0)])
    screen.say((1, "hello"))
    assert screen.flush() == "(rank 1) hello\n"


def test_a_line_of_all_ranks_is_one_at_once() -> None:
    screen = _running()
    assert screen.say((3, "Epoch 8"), (0, "Epoch 8"), (1, "Epoch 8"), (2, "Epoch 8")) == "(ranks 0-3) Epoch 8\n"
    assert screen.flush() == ""


def test_a_line_of_some_ranks_is_one_after_a_moment() -> None:
    screen = _running()
    assert screen.say((0, "Epoch 8"), (1, "Epoch 8")) == ""
    assert screen.say((3, "Epoch 8")) == ""
    assert screen.flush(0.2) == "(ranks 0-1,3) Epoch 8\n"
    screen.say((2, "Epoch 8"))
    assert screen.flush(0.2) == "(rank 2, node-b) Epoch 8\n", "a new line after that time"


def test_lines_keep_the_order_in_which_they_came() -> None:
    screen = _running()
    screen.say((0, "a"), (1, "a"), (0, "only rank 0"), (0, "b"), (1, "b"), (2, "a"), (2, "b"))
    assert screen.say((3, "a"), (3, "b")) == "(ranks 0-3) a\n", "what came before the other is not complete"
    assert screen.flush(0.2) == "(rank 0, node-a) only rank 0\n(ranks 0-3) b\n"


def test_a_rank_is_not_folded_into_a_line_before_one_that_it_has_printed() -> None:
    screen = _running()
    screen.say((0, "a"), (0, "b"), (1, "b"), (1, "a"))
    assert screen.flush(0.2) == "(rank 0, node-a) a\n(ranks 0-1) b\n(rank 1, node-a) a\n"


def test_repeated_lines_of_one_rank_are_all_shown() -> None:
    screen = _running()
    screen.say((0, "----"), (0, "a"), (0, "----"), (0, "----"))
    assert [line[17:] for line in screen.flush().splitlines()] == ["----", "a", "----", "----"]


def test_waiting_lines_are_shown_before_the_summary_and_before_the_next_generation() -> None:
    screen = _running()
    screen.say((0, "bye"), (1, "bye"))
    ended = r.GenerationEnded(at=T0, generation=1, why="resized", detected_at=T0, iteration=0)
    assert screen.feed([ended], gap_s=0.0) == "(ranks 0-1) bye\n"
    screen.say((1, "bye"))
    assert screen.feed([r.RunFinished(at=T0 + 1)], gap_s=0.0).startswith("(rank 1, node-a) bye\n")


def test_output_keeps_its_stream() -> None:
    stdout = io.StringIO()
    screen = Screen(stdout=stdout)
    lines = [LogLine(0, "stdout", "result"), LogLine(0, "stderr", "warning"), LogLine(0, "holdfast", "set up")]
    screen.terminal.logs(1, lines)
    assert screen.flush() == "(rank 0) warning\n(rank 0) set up\n"
    assert stdout.getvalue() == "(rank 0) result\n"


def test_what_is_printed_during_imports_says_so() -> None:
    assert _running().say((-1, "slow module")) == "(imports) slow module\n"


def test_only_the_last_state_of_a_progress_bar_is_shown() -> None:
    screen = _running()
    screen.say((0, "\r  0%|     |\r 50%|##   |\r100%|#####|"), (1, " 10%\r 20%\r\r"), (2, "\r"))
    assert screen.flush() == "(rank 0, node-a) 100%|#####|\n(rank 1, node-a)  20%\n(rank 2, node-b) \n"


def test_a_very_long_line_is_cut() -> None:
    screen = _running()
    screen.say((0, "x" * 12_345))
    assert screen.flush() == f"(rank 0, node-a) {'x' * 10_000}... [2345 more characters]\n"


@pytest.mark.parametrize(
    ("text", "plain", "coloured"),
    [
        ("\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("up\x1b[2A\x1b[Kand over", "upand over", "upand over"),
        ("\x1b]0;title\x07text", "text", "text"),
        ("bell\x07 and back\x08", "bell and back", "bell and back"),
        ("lone \x1b escape", "lone  escape", "lone  escape"),
        ("\x1bcreset", "reset", "reset"),
        ("\x1b7line \x1b(0drawing\x1b8", "line drawing", "line drawing"),
        ("8 bits \x9b2J", "8 bits 2J", "8 bits 2J"),
        ("cut off \x1b[3", "cut off [3", "cut off [3\x1b[0m"),
        ("cut off \x1b]0;title", "cut off ]0;title", "cut off ]0;title"),
    ],
)
def test_control_sequences_are_removed(text: str, plain: str, coloured: str) -> None:
    for interactive, expected in ((False, plain), (True, coloured)):
        screen = _running(interactive)
        screen.say((0, text))
        margin = "\x1b[2;36m(rank 0, node-a)\x1b[0m" if interactive else "(rank 0, node-a)"
        assert f"{margin} {expected}\n" in screen.flush()


def test_ranks_have_colours_of_their_own() -> None:
    screen = _running(interactive=True)
    screen.say((0, "a"), (1, "b"), (6, "c"))
    shown = screen.flush().removeprefix("\r\x1b[2K")
    assert [line.split("(")[0] for line in shown.splitlines()[:3]] == ["\x1b[2;36m", "\x1b[2;33m", "\x1b[2;36m"]


def test_waiting_lines_are_bounded() -> None:
    screen = _running()
    shown = "".join(screen.say((0, f"line {n}")) for n in range(5000))
    assert shown.count("\n") >= 3000

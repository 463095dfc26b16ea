"""Worker output on the terminal: rank prefixes, folding of equal lines, no cursor movement."""

from __future__ import annotations

import pytest
from tests.unit.files.shown import T0, begin
from tests.unit.terminal.screen import Screen

from holdfast.core import records as r


def _running(interactive: bool = False) -> Screen:
    """Four ranks on two hosts."""
    screen = Screen(interactive=interactive)
    agents = [r.AgentAdded(at=T0, agent=name, host=f"node-{name}", slots=2) for name in ("a", "b")]
    started = r.GenerationStarted(at=T0, generation=1, world_size=4, agents=("a", "b"), iteration=0)
    screen.feed([begin(), *agents, started])
    return screen


def test_a_line_says_who_printed_it() -> None:
    assert _running().say((0, "one"), (1, "two"), (2, "three"), (9, "four")) == (
        "(rank 0, node-a) one\n(rank 1, node-a) two\n(rank 2, node-b) three\n(rank 9) four\n"
    )


def test_equal_lines_of_several_ranks_are_folded() -> None:
    screen = _running()
    assert screen.say((0, "Epoch 8"), (1, "Epoch 8"), (3, "Epoch 8")) == "(rank 0, node-a) Epoch 8\n"
    assert screen.say((2, "Epoch 8"), (2, "done")) == "(rank 2, node-b) done\n"
    assert screen.flush(1.0) == "(rank 2, node-b) Epoch 8 [repeated 3x across ranks]\n"
    assert screen.flush(1.0) == ""
    assert screen.say((1, "Epoch 8")) == "(rank 1, node-a) Epoch 8\n", "a new line after that time"


def test_repeated_lines_of_one_rank_are_all_shown() -> None:
    screen = _running()
    assert (
        screen.say((0, "----"), (0, "a"), (0, "----"))
        == "(rank 0, node-a) ----\n(rank 0, node-a) a\n(rank 0, node-a) ----\n"
    )
    assert screen.flush() == ""


def test_folded_lines_are_flushed_at_the_end() -> None:
    screen = _running()
    screen.say((0, "bye"), (1, "bye"))
    shown = screen.feed([r.RunFinished(at=T0 + 1)], gap_s=0.0)
    assert shown.startswith("(rank 1, node-a) bye [repeated 1x across ranks]\n")


def test_generations_are_not_folded_into_one() -> None:
    screen = _running()
    screen.say((0, "hello"), (1, "hello"))
    ended = r.GenerationEnded(at=T0, generation=1, why="resized", detected_at=T0, iteration=0)
    assert screen.feed([ended], gap_s=0.0) == "(rank 1, node-a) hello [repeated 1x across ranks]\n"
    assert screen.say((1, "hello")) == "(rank 1, node-a) hello\n"


def test_only_the_last_state_of_a_progress_bar_is_shown() -> None:
    shown = _running().say((0, "\r  0%|     |\r 50%|##   |\r100%|#####|"), (1, " 10%\r 20%\r\r"), (2, "\r"))
    assert shown == "(rank 0, node-a) 100%|#####|\n(rank 1, node-a)  20%\n(rank 2, node-b) \n"


def test_a_very_long_line_is_cut() -> None:
    assert _running().say((0, "x" * 12_345)) == f"(rank 0, node-a) {'x' * 10_000}... [2345 more characters]\n"


@pytest.mark.parametrize(
    ("text", "plain", "coloured"),
    [
        ("\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("up\x1b[2A\x1b[Kand over", "upand over", "upand over"),
        ("\x1b]0;title\x07text", "text", "text"),
        ("bell\x07 and back\x08", "bell and back", "bell and back"),
        ("lone \x1b escape", "lone  escape", "lone \x1b escape"),
    ],
)
def test_control_sequences_are_removed(text: str, plain: str, coloured: str) -> None:
    assert _running().say((0, text)) == f"(rank 0, node-a) {plain}\n"
    assert _running(interactive=True).say((0, text)) == f"\x1b[2;36m(rank 0, node-a)\x1b[0m {coloured}\n"


def test_ranks_have_colours_of_their_own() -> None:
    shown = _running(interactive=True).say((0, "a"), (1, "b"), (6, "c"))
    assert [line.split("(")[0] for line in shown.splitlines()] == ["\x1b[2;36m", "\x1b[2;33m", "\x1b[2;36m"]


def test_open_folds_are_bounded() -> None:
    screen = _running()
    for n in range(5000):
        screen.terminal.logs(1, [])
        screen.say((0, f"line {n}"), (1, f"line {n}"))
    assert screen.flush(9.0).count("[repeated 1x across ranks]") <= 2001

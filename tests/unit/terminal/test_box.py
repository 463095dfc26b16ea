"""Boxes of two columns."""

from __future__ import annotations

from holdfast.views.terminal.box import box


def test_drawing_of_boxes() -> None:
    assert box("A long title indeed", [("a", "1"), ("bb", "22")], fine=False, right=True) == (
        "+---------------------+\n"
        "| A long title indeed |\n"
        "+---------------------+\n"
        "| a                 1 |\n"
        "| bb               22 |\n"
        "+---------------------+"
    )
    assert box("T", [("a", "1"), ("bb", "22")]).splitlines()[3] == "│ a    1  │"
    assert box("T", []) == "╭───╮\n│ T │\n├───┤\n╰───╯"

"""Escaping of text that others wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Damaged, WireError
from holdfast.printable import printable

SOURCES = Path(__file__).parents[2] / "src" / "holdfast"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 漢字", "plain, ünïcode, 漢字"),
        ("\x1b[2Jgone", "\\u001b[2Jgone"),
        ("\x9b31m", "\\u009b31m"),
        ("a\u202egnp.exe", "a\\u202egnp.exe"),
        ("two\r\nlines\tand a tab", "two  lines and a tab"),
        ("\udc80", "\\udc80"),
        ("\U000e0001", "\\udb40\\udc01"),
        ("\x7f\x00", "\\u007f\\u0000"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_newlines_are_kept_in_multiline_text() -> None:
    assert printable("a\n\tb\r\x1b", lines=True) == "a\n\tb \\u001b"


@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_nothing_unprintable_is_left_and_json_stays_json(text: str) -> None:
    assert printable(text).isprintable()
    assert json.loads(printable(json.dumps({"key": text}, indent=1, ensure_ascii=False), lines=True)) == {"key": text}


def test_errors_are_safe_to_print_wherever_they_surface() -> None:
    assert str(Damaged("\x1b[8mhidden: is damaged")) == "\\u001b[8mhidden: is damaged"
    assert str(WireError("two\nlines")) == "two\nlines"


def test_the_command_line_prints_through_one_place() -> None:
    elsewhere = [
        path.name
        for path in (SOURCES / "cli").glob("*.py")
        if path.name != "output.py"
        and re.search(r"\b(click\.s?echo|print)\((?!printable\(|f\"(error: \{printable|\\n\{con))", path.read_text())
    ]
    assert elsewhere == [], "use print_line, print_table or print_json of cli.output"

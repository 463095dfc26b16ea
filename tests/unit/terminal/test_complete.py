"""The terminal output of a run that is already complete."""

from __future__ import annotations

import io

import pytest

from holdfast.views.terminal.terminal import print_complete


def test_a_complete_run_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    print_complete(stream, "first", "/runs/first", 20)
    assert stream.getvalue() == "Run first is complete already, with 20 iterations: /runs/first\n"
    monkeypatch.setenv("HOLDFAST_QUIET", "1")
    print_complete(stream, "first", "/runs/first", 20)
    assert stream.getvalue().count("\n") == 1

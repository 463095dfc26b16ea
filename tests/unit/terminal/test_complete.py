"""The terminal output of a run that is already complete."""

from __future__ import annotations

import io

import pytest

from holdfast.views.terminal.terminal import print_complete


def test_a_complete_run_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stream = io.StringIO(), io.StringIO()
    print_complete(stdout, stream, "first", "/runs/first", 20)
    assert stream.getvalue() == "Run first is complete already, with 20 iterations: /runs/first\n"
    monkeypatch.setenv("HOLDFAST_QUIET", "1")
    print_complete(stdout, stream, "first", "/runs/first", 20)
    assert stdout.getvalue() == ""
    assert stream.getvalue().count("\n") == 1


def test_in_a_notebook_a_complete_run_says_so_in_the_cell() -> None:
    class OutStream(io.StringIO):
        __module__ = "ipykernel.iostream"

    stdout, stderr = OutStream(), io.StringIO()
    print_complete(stdout, stderr, "first", "/runs/first", 1)
    assert stdout.getvalue() == "Run first is complete already, with 1 iteration: /runs/first\n"
    assert stderr.getvalue() == ""

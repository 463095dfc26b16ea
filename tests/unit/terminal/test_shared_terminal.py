"""Several runs of a process in one terminal: one line each, below what all of them print."""

from __future__ import annotations

import gc
import io
import re
from typing import Any

import pytest

from holdfast.core import records as r
from holdfast.views.terminal.terminal import Terminal
from holdfast.wire.messages import LogLine

_CONTROL = re.compile(r"\r|\n|\x1b\[(\d*)([AJK])|[^\r\n\x1b]+")


def _shown(text: str) -> list[str]:
    """What a terminal with enough lines shows after this."""
    rows, row, column = [""], 0, 0
    for found in _CONTROL.finditer(text):
        match found[0]:
            case "\r":
                column = 0
            case "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            case part if part.startswith("\x1b"):
                assert column == 0 or found[2] == "A"
                if found[2] == "A":
                    row -= int(found[1])
                else:
                    rows[row] = ""
                    if found[2] == "J":
                        del rows[row + 1 :]
            case part:
                rows[row] = rows[row][:column] + part + rows[row][column + len(part) :]
                column += len(part)
    return [one.rstrip() for one in rows]


class _Runs:
    def __init__(self, *names: str, **options: Any) -> None:
        self.stream = io.StringIO()
        self.now = 1000.0
        settings: dict[str, Any] = {
            "interactive": True,
            "clock": lambda: self.now,
            "command": ["train.py"],
        }
        self.terminals = {
            name: Terminal(self.stream, self.stream, name=name, uri=f"/store/{name}", **settings, **options)
            for name in names
        }

    def start(self, name: str) -> None:
        self.record(name, r.ControllerStarted(at=1.0, epoch=1, host="h", pid=1, workers=1))
        self.record(name, r.GenerationStarted(at=1.0, generation=1, world_size=1, agents=("a",), iteration=0))
        self.record(name, r.GenerationRunning(at=1.0, generation=1))

    def report(self, name: str, iteration: int, loss: float) -> None:
        self.record(name, r.Reported(at=2.0, generation=1, iteration=iteration, metrics={"loss": loss}))

    def record(self, name: str, record: r.Record) -> None:
        self.now += 1.0
        self.terminals[name].record(record)

    def shown(self) -> list[str]:
        return _shown(self.stream.getvalue())


def test_each_run_has_a_line_of_its_own_and_output_goes_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    runs = _Runs("a", "b")
    for name in ("a", "b"):
        runs.start(name)
    runs.report("a", 1, 0.5)
    runs.report("b", 3, 0.25)
    assert runs.shown()[-2:] == ["a: loss=0.5 | it 1 | 1 worker", "b: loss=0.25 | it 3 | 1 worker"]
    runs.report("a", 2, 0.125)
    runs.terminals["b"].logs(1, [LogLine(0, "stdout", "hello")])
    *_, printed, first, second = runs.shown()
    assert printed == "(b, rank 0) hello"
    assert (first, second) == ("a: loss=0.125 | it 2 | 1 worker", "b: loss=0.25 | it 3 | 1 worker")


def test_the_last_run_of_a_terminal_is_shown_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    runs = _Runs("a", "b")
    for name in ("a", "b"):
        runs.start(name)
    runs.record("a", r.RunFinished(at=3.0))
    runs.terminals["a"].flush(final=True)
    runs.terminals.pop("a").close()
    runs.report("b", 3, 0.25)
    shown = runs.shown()
    assert shown[-1] == "loss=0.25 | it 3 | 1 worker"
    assert sum("it 3" in line or "worker running" in line for line in shown) == 1, "nothing is left of the other line"
    assert any(line.startswith("a: Training completed") for line in shown)


def test_a_terminal_that_failed_and_was_never_closed_leaves_no_line() -> None:
    runs = _Runs("a", "b")
    runs.start("a")
    del runs.terminals["a"]
    gc.collect()
    runs.start("b")
    assert runs.shown()[-1] == "1 worker running, 0s"


def test_no_more_lines_are_drawn_than_half_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "8")
    names = [f"run{n}" for n in range(9)]
    runs = _Runs(*names)
    for name in names:
        runs.start(name)
    assert [line.split(":")[0] for line in runs.shown()[-4:]] == ["run0", "run1", "run2", "and 6 more runs"]

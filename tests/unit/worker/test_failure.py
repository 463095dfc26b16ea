"""What is kept of an exception that a worker raised."""

from __future__ import annotations

import bdb
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.core.records import WorkerFailure
from holdfast.errors import ConfigError, NotFound
from holdfast.storage.locate import open_store
from holdfast.worker.bootstrap import _hint
from holdfast.worker.environment import refuse_breakpoints
from holdfast.worker.failure import failure_of


def _read_nowhere(path: Path) -> None:
    open_store(path).get("nothing")


def _failure(path: Path) -> WorkerFailure:
    try:
        _read_nowhere(path)
    except NotFound as error:
        return failure_of(error, 0)
    raise AssertionError("it was read")


def test_an_error_of_ours_is_told_without_our_frames(tmp_path: Path) -> None:
    trace = _failure(tmp_path).traceback
    assert trace is not None
    assert trace.splitlines()[-1].startswith("holdfast.errors.NotFound: ")
    assert 'open_store(path).get("nothing")' in trace
    assert str(Path(holdfast.__file__).parent) not in trace
    assert "The above exception" not in trace


def test_an_error_of_the_users_keeps_all_frames() -> None:
    try:
        sys.modules["json"].loads("{")
    except ValueError as error:
        trace = failure_of(error, 0).traceback
    assert trace is not None and "decoder.py" in trace


@pytest.mark.parametrize("chosen", [None, "", "pdb.set_trace"])
def test_breakpoint_in_a_worker_names_local_mode(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    if chosen is None:
        monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    else:
        monkeypatch.setenv("PYTHONBREAKPOINT", chosen)
    refuse_breakpoints()
    with pytest.raises(ConfigError, match="num_workers=0"):
        breakpoint()


def test_breakpoint_in_a_worker_calls_the_debugger_that_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setenv("PYTHONBREAKPOINT", "builtins.print")
    refuse_breakpoints()
    breakpoint("remote debugger")
    assert capsys.readouterr().out == "remote debugger\n"


def test_a_debugger_without_input_is_pointed_to_local_mode() -> None:
    assert "num_workers=0" in _hint(bdb.BdbQuit())
    assert _hint(ValueError("x")) == ""

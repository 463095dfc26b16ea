"""Errors become one sentence and an exit code; `HOLDFAST_DEBUG` shows the traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import __version__, errors
from holdfast.cli import exit_codes
from holdfast.cli.main import main


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Damaged("x"), 1),
        (errors.CheckpointError("x"), 1),
        (errors.Fenced("x"), 1),
        (RuntimeError("x"), 1),
        (errors.InvalidURI("x"), 2),
        (errors.MissingExtra("x"), 2),
        (errors.NotFound("x"), 3),
        (errors.NotCommitted("x"), 3),
        (errors.NameTaken("x"), 4),
        (errors.AlreadyExists("x"), 4),
        (exit_codes.Refused("x"), 4),
        (errors.Unavailable("x"), 5),
        (errors.AccessDenied("x"), 5),
        (errors.OutOfSpace("x"), 5),
    ],
)
def test_each_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert exit_codes.code_of(error) == code


def test_error_messages_name_the_file_and_no_internals() -> None:
    assert exit_codes.sentence(errors.NotFound("There is none.")) == "There is none."
    assert exit_codes.sentence(PermissionError(13, "Permission denied", "/x")) == "/x: Permission denied."
    assert "HOLDFAST_DEBUG=1" in exit_codes.sentence(KeyError("k"))


def test_the_codes_are_documented_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "--help"]) == 0
    told = capsys.readouterr().out
    for code in (
        exit_codes.OK,
        exit_codes.FAILED,
        exit_codes.USAGE,
        exit_codes.NOT_FOUND,
        exit_codes.REFUSED,
        exit_codes.STORAGE,
        exit_codes.INTERRUPTED,
    ):
        assert f"\n    {code:<5}" in told


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"holdfast {__version__}\n"


def test_usage_errors_show_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "get", "run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: Missing argument 'TARGET'")
    assert "Usage: holdfast ckpt get [OPTIONS] CHECKPOINT TARGET" in said
    assert "Try: holdfast ckpt get --help" in said


def test_a_traceback_is_shown_on_request_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = str(tmp_path / "gone")
    monkeypatch.delenv("HOLDFAST_DEBUG", raising=False)
    assert main(["ckpt", "ls", gone]) == 3
    assert capsys.readouterr().err == f"error: {gone} does not exist, or is empty: check the path.\n"
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    assert main(["ckpt", "ls", gone]) == 3
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["ckpt"]])
def test_without_arguments_the_help_is_shown_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("Usage: holdfast") and shown.err.count("Usage:") == 1
    assert "\nCommands:\n" in shown.err


def test_python_m_holdfast_is_the_command_line() -> None:
    command = [sys.executable, "-m", "holdfast", "--version"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert answer.stdout == f"holdfast {__version__}\n"

"""Escape sequences in files of others are printed escaped, and never reach the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.small import fit, save
from tests.faults.programs.sandbox import Sandbox

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.commit import commit_directory
from holdfast.cli.main import main
from holdfast.storage.locate import open_store
from holdfast.train import TrainingFailedError

_ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b8m\u202e"
_HARMLESS = set("\n")


def _is_safe(text: str) -> bool:
    return all(char.isprintable() or char in _HARMLESS for char in text)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose manifests and file names hold escape sequences, one of them damaged."""
    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    (source / f"weights{_ESCAPE}").write_text("data")
    store = open_store(run)
    committed = commit_directory(store, source, metrics={f"loss{_ESCAPE}": f"low{_ESCAPE}"})
    altered = msgspec.structs.replace(committed, writer=f"host{_ESCAPE}", created_at=f"2026{_ESCAPE}-01-01T00:00:00")
    store.put(f"{committed.name}/.manifest.json", manifests.encode(altered))
    (run / f"copy{_ESCAPE}").mkdir()
    (run / f"copy{_ESCAPE}" / ".manifest.json").write_bytes(
        manifests.encode(altered).replace(b'"index":0', b'"index":1')
    )
    return run


@pytest.mark.parametrize("command", ["ls", "show", "verify", "get"])
def test_the_command_line_shows_no_escape_of_a_manifest(
    hostile: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [str(tmp_path / f"target{_ESCAPE}")] if command == "get" else []
    main(["ckpt", command, str(hostile), *target])
    out, err = capsys.readouterr()
    assert _is_safe(out) and _is_safe(err), out + err
    assert "\\u001b]0;owned" in out + err


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_json_holds_the_text_itself_in_escaped_form(
    hostile: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["ckpt", command, str(hostile), "--json"])
    out, err = capsys.readouterr()
    assert _is_safe(out) and _is_safe(err)
    assert any(_ESCAPE in text for text in _texts(json.loads(out)))


def test_an_error_names_a_hostile_directory_safely(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(hostile / f"copy{_ESCAPE}")]) == 1
    assert main(["ckpt", "ls", str(hostile / f"nowhere{_ESCAPE}")]) == 3
    out, err = capsys.readouterr()
    assert _is_safe(out) and _is_safe(err), err
    assert "\\u001b]0;owned" in err


def _fails() -> None:
    raise RuntimeError(f"bad batch {_ESCAPE}")


def test_a_failed_run_tells_its_error_without_escapes(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_QUIET")
    with pytest.raises(TrainingFailedError) as caught:
        fit(sandbox, _fails)
    assert "bad batch \\u001b]0;owned" in str(caught.value) and _is_safe(str(caught.value))
    assert main(["events", str(sandbox.storage / "run")]) == 0
    assert main(["events", str(sandbox.storage / "run"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "bad batch \\u001b]0;owned" in out and _is_safe(out)
    ours = [line for line in err.splitlines() if not line.startswith("(rank ")]
    assert "bad batch \\u001b]0;owned" in "\n".join(ours) and all(map(_is_safe, ours)), err


def _saves() -> None:
    save(1)


def test_warnings_of_a_driver_show_no_escape_of_a_file_name(sandbox: Sandbox, caplog: pytest.LogCaptureFixture) -> None:
    fit(sandbox, _saves)
    run = sandbox.storage / "run"
    (run / "journal" / f"stray{_ESCAPE}.jsonl").write_text("nonsense\n")
    (run / f"copy{_ESCAPE}").mkdir()
    (run / f"copy{_ESCAPE}" / ".manifest.json").write_bytes((run / "checkpoint_000000" / ".manifest.json").read_bytes())
    (run / "checkpoint_000000" / "value.json").write_text("2")
    fit(sandbox, _saves, resume="restart")
    assert "\\u001b]0;owned" in caplog.text
    assert all(_is_safe(record.getMessage()) for record in caplog.records), caplog.text


def _texts(shape: Any) -> list[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(shape, str):
        return [shape]
    if isinstance(shape, dict):
        return [text for key, value in shape.items() for text in (key, *_texts(value))]
    if isinstance(shape, list):
        return [text for value in shape for text in _texts(value)]
    return []

"""Logs and artifacts go to the run's directory, once for each change, and never over the run's own files."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.artifact_sync import ArtifactSync
from holdfast.agent.joined_output import JoinedOutput, output_part
from holdfast.errors import Unavailable
from holdfast.storage.posix.store import PosixStore


def _output(tmp_path: Path, *names: str) -> JoinedOutput:
    return JoinedOutput(tmp_path / "logs", tmp_path / "output", names)


def _mirror(tmp_path: Path, *names: str) -> tuple[ArtifactSync, PosixStore, Path, Path]:
    store = PosixStore(tmp_path / "run")
    logs, work = tmp_path / "logs", tmp_path / "work"
    (logs / "generation_000001").mkdir(parents=True)
    work.mkdir()
    return ArtifactSync(lambda: store, logs, _output(tmp_path, *names), work), store, logs, work


def test_changed_files_are_uploaded_and_others_are_not(tmp_path: Path) -> None:
    mirror, store, logs, work = _mirror(tmp_path)
    (logs / "generation_000001" / "rank_0.log").write_text("line\n")
    (work / "plots").mkdir()
    (work / "plots" / "loss.svg").write_text("<svg/>")
    mirror.sync_logs()
    mirror.sync_artifacts()
    assert store.get("logs/generation_000001/rank_0.log") == b"line\n"
    assert store.get("plots/loss.svg") == b"<svg/>"
    store.put("plots/loss.svg", b"changed in storage")
    mirror.sync_artifacts()
    assert store.get("plots/loss.svg") == b"changed in storage"
    (work / "plots" / "loss.svg").write_text("<svg>2</svg>")
    mirror.sync_artifacts()
    assert store.get("plots/loss.svg") == b"<svg>2</svg>"


def test_files_that_the_user_named_are_there_and_no_artifact_replaces_them(tmp_path: Path) -> None:
    """On no node: where rank 0 was never, the name is the run's own as well."""
    mirror, store, logs, work = _mirror(tmp_path, "stdout", "all/stderr")
    (work / "stdout").write_text("the user's")
    (work / "all").write_text("the user's")
    mirror.sync_artifacts()
    assert store.list() == []
    part = output_part(logs, 3, "stdout")
    part.parent.mkdir(parents=True)
    part.write_text("line\n")
    mirror.sync_logs()
    assert store.get("stdout") == store.get("logs/generation_000003/output/stdout") == b"line\n"


def test_a_long_log_is_not_uploaded_again_for_each_line(tmp_path: Path) -> None:
    mirror, store, logs, _ = _mirror(tmp_path)
    log, key = logs / "generation_000001" / "rank_0.log", "logs/generation_000001/rank_0.log"
    stored, sent_bytes = 0, 0
    for count in range(1, 1001):
        log.write_text("line\n" * count)
        mirror.sync_logs(still_written=True)
        if store.size(key) != stored:
            stored = store.size(key)
            sent_bytes += stored
        assert stored * 9 // 8 >= log.stat().st_size - len("line\n")
    assert sent_bytes <= 9 * log.stat().st_size
    log.write_text("line\n" * 1001)
    mirror.sync_logs()
    assert store.size(key) == 1001 * len("line\n")


def test_artifacts_with_names_of_run_files_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror, store, _, work = _mirror(tmp_path)
    store.put("result.json", b"ours")
    (work / "result.json").write_text("theirs")
    (work / "checkpoint_000000").mkdir()
    (work / "checkpoint_000000" / ".manifest.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        mirror.sync_artifacts()
        mirror.sync_artifacts()
    assert store.get("result.json") == b"ours"
    assert [entry.key for entry in store.list()] == ["result.json"]
    assert len(caplog.records) == 2


def test_a_working_directory_inside_storage_is_not_synced(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.txt").write_text("a")
    before = (tmp_path / "run" / "a.txt").stat().st_ino
    ArtifactSync(lambda: store, tmp_path / "logs", _output(tmp_path), tmp_path / "run").sync_artifacts()
    assert (tmp_path / "run" / "a.txt").stat().st_ino == before


def test_a_failed_sync_is_retried_next_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mirror, store, _, work = _mirror(tmp_path)
    (work / "a.txt").write_text("a")
    (tmp_path / "run").write_text("in the way")
    mirror.sync_artifacts()
    assert len(caplog.records) == 1
    (tmp_path / "run").unlink()
    mirror.sync_artifacts()
    assert store.get("a.txt") == b"a"


def test_a_turn_that_takes_too_long_is_given_up_and_made_good_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, store, logs, work = _mirror(tmp_path)
    (work / "artifact").write_text("x")
    late = ArtifactSync(lambda: store, logs, _output(tmp_path), work, timeout_s=-1.0)
    with caplog.at_level(logging.WARNING):
        late.sync_artifacts()
    assert store.list() == [] and "SyncConfig(sync_timeout=-1)" in caplog.text
    late._timeout_s = 60.0
    late.sync_artifacts()
    assert store.get("artifact") == b"x"


@pytest.mark.parametrize("error", [Unavailable("The namenode does not answer."), ImportError("No module named 'fs'")])
def test_storage_that_cannot_be_opened_is_a_warning_and_tried_again(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever calls this now and then would take anything else for a failure of the run's."""
    _, store, logs, work = _mirror(tmp_path)
    (work / "a.txt").write_text("a")
    (logs / "generation_000001" / "rank_0.log").write_text("line\n")
    errors = [error, error]

    def open_store() -> PosixStore:
        if errors:
            raise errors.pop()
        return store

    sync = ArtifactSync(open_store, logs, _output(tmp_path), work)
    sync.sync_logs()
    sync.sync_artifacts()
    assert caplog.text.count(str(error)) == 2
    sync.sync_logs()
    sync.sync_artifacts()
    assert [entry.key for entry in store.list()] == ["a.txt", "logs/generation_000001/rank_0.log"]


def test_a_directory_that_vanishes_while_it_is_looked_through_keeps_nothing_else_from_being_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As functions do that write temporary files where they work."""
    mirror, store, _, work = _mirror(tmp_path)
    (work / "a").mkdir()
    (work / "b.txt").write_text("b")
    scandir = os.scandir

    def remove_first(path: str | Path) -> Any:
        if Path(path) == work / "a":
            (work / "a").rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", remove_first)
    mirror.sync_artifacts()
    assert not (work / "a").exists() and store.get("b.txt") == b"b"

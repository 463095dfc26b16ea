"""Logs and artifacts go to the run's directory, once for each change, and never over the run's own files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast.agent.artifact_sync import ArtifactSync
from holdfast.storage.posix.store import PosixStore


def _mirror(tmp_path: Path) -> tuple[ArtifactSync, PosixStore, Path, Path]:
    store = PosixStore(tmp_path / "run")
    logs, work = tmp_path / "logs", tmp_path / "work"
    (logs / "generation_000001").mkdir(parents=True)
    work.mkdir()
    return ArtifactSync(lambda: store, logs, tmp_path / "output", work), store, logs, work


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


def test_output_files_keep_their_names_and_no_artifact_replaces_them(tmp_path: Path) -> None:
    mirror, store, _, work = _mirror(tmp_path)
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "stdout").write_text("line\n")
    (work / "stdout").write_text("the user's")
    mirror.sync_artifacts()
    assert store.list() == []
    mirror.sync_logs()
    assert store.get("stdout") == b"line\n"


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
    ArtifactSync(lambda: store, tmp_path / "logs", tmp_path / "output", tmp_path / "run").sync_artifacts()
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
    late = ArtifactSync(lambda: store, logs, tmp_path / "output", work, timeout_s=-1.0)
    with caplog.at_level(logging.WARNING):
        late.sync_artifacts()
    assert store.list() == [] and "SyncConfig(sync_timeout=-1)" in caplog.text
    late._timeout_s = 60.0
    late.sync_artifacts()
    assert store.get("artifact") == b"x"

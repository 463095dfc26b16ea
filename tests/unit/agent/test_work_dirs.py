"""Work directories of runs: kept after a run, removed when nobody has used them for long."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.session_dir import SessionDir
from holdfast.agent.work_dirs import UNUSED_S, WorkDirs, sweep_work_dirs


@pytest.fixture
def used() -> Iterator[WorkDirs]:
    dirs = WorkDirs(removes_empty=True)
    yield dirs
    dirs.close()


def _age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def _make(work: Path, name: str, age_s: float) -> Path:
    path = work / name
    path.mkdir(parents=True)
    (path / "model.pt").touch()
    _age(path, age_s)
    return path


def test_only_what_was_not_used_for_long_is_removed(tmp_path: Path) -> None:
    _make(tmp_path, "old-1", UNUSED_S + 60)
    _make(tmp_path, "new-2", UNUSED_S - 60)
    (tmp_path / "file").touch()
    _age(tmp_path / "file", UNUSED_S * 2)
    assert sweep_work_dirs(tmp_path) == ["old-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new-2"]
    assert sweep_work_dirs(tmp_path / "missing") == []


def test_the_directory_of_a_live_run_is_not_removed_however_old(tmp_path: Path, used: WorkDirs) -> None:
    path = _make(tmp_path, "run-1", UNUSED_S * 2)
    used.use(path)
    _age(path, UNUSED_S * 2)  # as if the machine had been suspended
    assert sweep_work_dirs(tmp_path) == []
    assert (path / "model.pt").exists()
    used.close()
    assert sweep_work_dirs(tmp_path) == ["run-1"]


def test_the_time_of_a_used_directory_is_renewed(tmp_path: Path, used: WorkDirs) -> None:
    path = _make(tmp_path, "run-1", UNUSED_S * 2)
    used.use(path)
    assert time.time() - path.stat().st_mtime < UNUSED_S
    _age(path, UNUSED_S * 2)
    used.renew_times()
    assert time.time() - path.stat().st_mtime < UNUSED_S


def test_a_sweep_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    _make(tmp_path, "run-1.removing", 0.0)
    sweep_work_dirs(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_a_directory_is_left_alone(tmp_path: Path) -> None:
    _make(tmp_path / "elsewhere", "data", UNUSED_S * 2)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "run-1").symlink_to(tmp_path / "elsewhere" / "data")
    os.utime(tmp_path / "work" / "run-1", (0, 0), follow_symlinks=False)
    assert sweep_work_dirs(tmp_path / "work") == []
    assert (tmp_path / "elsewhere" / "data" / "model.pt").exists()


def test_an_agent_sweeps_when_it_starts_and_keeps_its_own(tmp_path: Path) -> None:
    old = _make(tmp_path / "work", "old-1", UNUSED_S * 2)
    own = _make(tmp_path / "work", "own-2", 0.0)
    first = SessionDir("first", tmp_path)
    assert not old.exists()
    first.work_dirs.use(own)
    _age(own, UNUSED_S * 2)
    second = SessionDir("second", tmp_path)
    assert own.exists()
    first.remove()
    second.remove()
    SessionDir("third", tmp_path).remove()
    assert not own.exists()


def test_an_empty_work_directory_goes_with_its_last_run_and_another_stays(tmp_path: Path) -> None:
    dirs = WorkDirs(removes_empty=True)
    empty, used = tmp_path / "empty-1", tmp_path / "used-1"
    for path in (empty, empty, used):
        dirs.use(path)
    (used / "file").touch()
    dirs.release(empty)
    assert empty.is_dir()
    dirs.release(empty)
    dirs.release(used)
    assert not empty.exists()
    assert (used / "file").exists()
    dirs.close()


def test_an_empty_work_directory_stays_while_another_agent_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "run-1"
    one, other = WorkDirs(removes_empty=True), WorkDirs(removes_empty=True)
    unsure = WorkDirs(removes_empty=False)
    for dirs in (one, other, unsure):
        dirs.use(path)
    one.release(path)
    assert path.is_dir()
    other.release(path)
    unsure.release(path)
    assert path.is_dir()

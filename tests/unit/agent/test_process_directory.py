"""Directories of processes whose name is used again while somebody else sweeps the one before."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from holdfast.agent import process_directory
from holdfast.agent.process_directory import ProcessDirectory, sweep_dead
from holdfast.linux.locked_directory import lock_path_of, take_lock


def test_a_lock_that_somebody_who_sweeps_holds_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "name").mkdir()
    lock = take_lock(lock_path_of(tmp_path / "name"))
    assert lock is not None
    is_tried = threading.Event()
    monkeypatch.setattr("time.sleep", lambda _: is_tried.set())

    def sweep() -> None:
        is_tried.wait(60)
        lock_path_of(tmp_path / "name").unlink()
        os.close(lock)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    mine = ProcessDirectory(tmp_path, "name")
    sweeper.join()
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_free_while_what_was_left_under_it_is_still_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be large. What is removed is the old directory, not the new one."""
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "old").touch()
    is_removing, may_remove, rmtree = threading.Event(), threading.Event(), shutil.rmtree

    def remove(path: Path, *, ignore_errors: bool) -> None:
        if threading.current_thread() is sweeper:
            is_removing.set()
            assert may_remove.wait(60)
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    sweeper = threading.Thread(target=sweep_dead, args=(tmp_path,))
    sweeper.start()
    assert is_removing.wait(60)
    monkeypatch.setattr(process_directory, "sweep_dead", lambda _: [])
    mine = ProcessDirectory(tmp_path, "name")
    (mine.path / "new").touch()
    may_remove.set()
    sweeper.join()
    assert [path.name for path in mine.path.iterdir()] == ["new"]
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_removal_that_was_interrupted_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "old").touch()
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert sweep_dead(tmp_path) == ["name"]
    (left,) = tmp_path.iterdir()
    assert sweep_dead(tmp_path) == [left.name]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_a_process_that_lives_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_directory, "_PATIENCE_S", 0.05)
    mine = ProcessDirectory(tmp_path, "name")
    with pytest.raises(FileExistsError, match="another process's"):
        ProcessDirectory(tmp_path, "name")
    mine.remove()

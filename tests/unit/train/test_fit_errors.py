"""Errors of Holdfast's own that `fit()` raises before anything has started."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.train import DataParallelTrainer, RunConfig


def _function() -> None:
    raise AssertionError("it must not run")


def _fit_on_a_file(tmp_path: Path) -> StorageError:
    (tmp_path / "file").touch()
    trainer = DataParallelTrainer(_function, run_config=RunConfig(name="run", storage_path=tmp_path / "file"))
    with pytest.raises(StorageError) as caught:
        trainer.fit()
    return caught.value


def test_a_storage_error_is_told_without_frames_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_DEBUG", raising=False)
    error = _fit_on_a_file(tmp_path)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["_fit_on_a_file", "fit"]
    assert error.__cause__ is None and error.__suppress_context__


def test_debug_shows_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    assert len(traceback.extract_tb(_fit_on_a_file(tmp_path).__traceback__)) > 4

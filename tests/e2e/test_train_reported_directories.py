"""Directories that `train.report` refuses: the storage, its parents, and the agent's own directories."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.small import fit, save, value_of
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.errors import ConfigError, Damaged, NotCommitted
from holdfast.train import Checkpoint, CheckpointUploadMode

_LET_GO: list[dict[str, Any]] = [
    {"delete_local_checkpoint_after_upload": True},
    {"checkpoint_upload_mode": CheckpointUploadMode.ASYNC},
    {"checkpoint_upload_mode": CheckpointUploadMode.SYNC, "delete_local_checkpoint_after_upload": True},
]


def _tree(root: Path) -> set[str]:
    """Every file below that a run does not itself write from now on."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and "journal" not in path.parts}


def _refused(report: Callable[[], None]) -> str:
    try:
        report()
    except ConfigError as error:
        return str(error)
    return ""


def _linked(target: Path) -> Path:
    link = Path(tempfile.mkdtemp()) / "link"
    link.symlink_to(target, target_is_directory=True)
    return link


@pytest.mark.parametrize("options", [{}, *_LET_GO], ids=["default", "delete", "async", "sync"])
def test_reporting_the_storage_directory_or_its_parent_is_refused(sandbox: Sandbox, options: dict[str, Any]) -> None:
    def other() -> None:
        save(7)

    fit(sandbox, other, name="other")
    before = _tree(sandbox.storage / "other")
    storage = sandbox.storage

    def function() -> list[str]:
        save(1, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
        here = storage / "run"
        wrong = [storage, here, storage.parent, _linked(storage), _linked(storage.parent), here / ".." / "run"]
        if options:
            wrong += [storage / "other", here / "journal", storage / "other" / "journal"]
        said = [
            _refused(lambda path=path: train.report({}, checkpoint=Checkpoint(path), **options))  # type: ignore[misc]
            for path in wrong
        ]
        save(2)
        return said

    result = fit(sandbox, function)
    assert all("train.report() cannot take" in said for said in result.return_value), result.return_value
    assert result.checkpoint is not None and value_of(result.checkpoint) == 2
    assert _tree(sandbox.storage / "other") >= before
    assert sandbox.check_stored("other") == ["checkpoint_000000"]
    assert sandbox.check_stored() == ["checkpoint_000000", "checkpoint_000001"]


@pytest.mark.parametrize("options", _LET_GO, ids=["delete", "async", "sync"])
def test_the_directories_of_agent_and_worker_are_refused_on_any_storage(
    sandbox: Sandbox, options: dict[str, Any]
) -> None:
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow import fs

    cache = sandbox.cache

    def function() -> list[str]:
        Path("kept.txt").write_text("kept")
        wrong = [Path(), Path(".."), cache, cache.parent, cache / "agents", Path(tempfile.gettempdir())]
        said = [
            _refused(lambda path=path: train.report({}, checkpoint=Checkpoint(path), **options))  # type: ignore[misc]
            for path in wrong
        ]
        assert Path("kept.txt").exists()
        save(2, **options)
        return said

    filesystem = fs.PyFileSystem(fs.FSSpecHandler(LocalFileSystem()))
    result = fit(sandbox, function, storage_filesystem=filesystem, storage_path=str(sandbox.storage))
    assert all("train.report() cannot take" in said for said in result.return_value), result.return_value
    assert result.checkpoint is not None and value_of(result.checkpoint) == 2


def test_a_committed_checkpoint_may_be_reported_again_and_is_verified_and_kept(sandbox: Sandbox) -> None:
    def function() -> None:
        save(1, checkpoint_upload_mode=CheckpointUploadMode.SYNC)
        newest = train.get_checkpoint()
        assert newest is not None
        again: dict[str, Any] = {"checkpoint_upload_mode": CheckpointUploadMode.SYNC}
        train.report({"value": 1}, checkpoint=newest, delete_local_checkpoint_after_upload=True, **again)
        assert value_of(newest) == 1
        draft = Path(newest.path).parent / "draft"
        draft.mkdir()
        (draft / ".reserved.json").write_text("{}")
        with pytest.raises(NotCommitted):
            train.report({}, checkpoint=Checkpoint(draft))
        (draft / ".reserved.json").unlink()
        draft.rmdir()
        altered = Path(newest.path, "value.json")
        altered.unlink()  # the second checkpoint may share the file
        altered.write_text("8")
        with pytest.raises(Damaged):
            train.report({"value": 1}, checkpoint=newest)

    result = fit(sandbox, function)
    assert [value_of(checkpoint) for checkpoint, _ in result.best_checkpoints[1:]] == [1]

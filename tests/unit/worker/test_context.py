"""What `get_context().get_storage()` says of the run's place in storage."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.worker.fake_agent import make_assignment

from holdfast.checkpoint.handle import Checkpoint
from holdfast.worker.context import StorageContext


def test_paths_on_remote_storage_have_no_scheme() -> None:
    """As pyarrow's filesystems want them; `Checkpoint` takes them with that filesystem."""
    storage = StorageContext(make_assignment(storage="s3://bucket/runs/run", trial_dir="s3://bucket/runs/run"))
    assert storage.uri == "s3://bucket/runs/run"
    assert storage.experiment_fs_path == storage.trial_fs_path == "bucket/runs/run"
    assert storage.storage_fs_path == "bucket/runs"
    path = storage.build_checkpoint_path_from_name("best")
    assert path == "bucket/runs/run/best"
    assert storage.extract_checkpoint_dir_name_from_path(path) == "best"
    with pytest.raises(ValueError, match="bucket/other/best does not lie in the run's directory bucket/runs/run"):
        storage.extract_checkpoint_dir_name_from_path("bucket/other/best")


def test_a_checkpoint_is_copied_to_the_run(tmp_path: Path) -> None:
    storage = StorageContext(make_assignment(storage=str(tmp_path / "run"), trial_dir=str(tmp_path / "run")))
    (tmp_path / "mine" / "below").mkdir(parents=True)
    (tmp_path / "mine" / "below" / "model").write_text("weights")
    name = storage.make_default_checkpoint_dir_name()
    stored = storage.persist_current_checkpoint(Checkpoint(tmp_path / "mine"), name)
    assert stored == Checkpoint(storage.build_checkpoint_path_from_name(name))
    assert (tmp_path / "run" / name / "below" / "model").read_text() == "weights"

"""`can_restore` and `restore`: a run found by its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.commit import commit_directory
from holdfast.errors import ConfigError
from holdfast.storage.locate import open_store
from holdfast.train import FailureConfig, RunConfig
from holdfast.train.torch import TorchTrainer


def train_loop() -> None:
    """Never called here."""


def test_a_run_is_found_by_its_identity_or_by_a_committed_checkpoint(tmp_path: Path) -> None:
    assert not TorchTrainer.can_restore(tmp_path / "run")
    (tmp_path / "run" / "other").mkdir(parents=True)
    assert not TorchTrainer.can_restore(tmp_path / "run")
    open_store(tmp_path / "run").put("run.json", b"{}")
    assert TorchTrainer.can_restore(str(tmp_path / "run") + "/")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.pt").write_text("weights")
    commit_directory(open_store(tmp_path / "bare"), tmp_path / "files")
    assert TorchTrainer.can_restore(tmp_path / "bare")


def test_can_restore_writes_nothing(tmp_path: Path) -> None:
    assert not TorchTrainer.can_restore(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_restore_points_at_the_path_whatever_the_configuration_says(tmp_path: Path) -> None:
    open_store(tmp_path / "run").put("run.json", b"{}")
    trainer = TorchTrainer.restore(
        tmp_path / "run",
        train_loop_per_worker=train_loop,
        run_config=RunConfig(name="x", storage_path="/elsewhere", failure_config=FailureConfig(max_failures=4)),
    )
    run = trainer.run_config
    assert (run.storage_path, run.name, run.resume) == (str(tmp_path), "run", "must")
    assert run.failure_config.max_failures == 4
    assert isinstance(trainer, TorchTrainer)


def test_restore_without_a_run_or_a_function_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run at .*run; ask TorchTrainer.can_restore\(\) first"):
        TorchTrainer.restore(tmp_path / "run", train_loop_per_worker=train_loop)
    with pytest.raises(ConfigError, match="no code is kept in storage, so pass the function again"):
        TorchTrainer.restore(tmp_path / "run")

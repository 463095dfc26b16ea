"""Where an experiment's data goes: each of the set-ups that Ray Tune's guide to syncing shows, in code of our own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.contract import servers
from tests.faults.programs.sandbox import Sandbox

import holdfast
from holdfast import air, tune
from holdfast.air.config import RunConfig
from holdfast.errors import ConfigError
from holdfast.storage.uri import join
from holdfast.train import DataParallelTrainer
from holdfast.tune.syncer import Syncer

_MODULE = """
import os

from holdfast.air import Checkpoint, session


def my_trainable(config):
    checkpoint = session.get_checkpoint()
    start = checkpoint.to_dict()["step"] + 1 if checkpoint else 0
    for step in range(start, 8):
        if step == 5 and not os.path.exists(os.environ["MEND"]):
            raise RuntimeError("interrupted")
        session.report({"max-auc": step / 10, "start": start}, checkpoint=Checkpoint.from_dict({"step": step}))
"""


@pytest.fixture
def mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with a trainable, as users have one; the trainable fails at its fifth step until this file exists."""
    (tmp_path / "your_module.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "your_module", raising=False)
    monkeypatch.setenv("MEND", str(tmp_path / "mend"))
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "10")
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    return tmp_path / "mend"


def check(results: tune.ResultGrid, names: list[str]) -> None:
    """The only trial went on from its last checkpoint, and these are kept."""
    (result,) = results
    assert result.error is None and result.metrics is not None and result.checkpoint is not None
    assert (result.metrics["max-auc"], result.metrics["start"]) == (0.7, 5)
    assert result.checkpoint.to_dict() == {"step": 7}
    kept = [checkpoint.path.rpartition("/")[2] for checkpoint, _ in result.best_checkpoints]
    assert sorted(kept) == names


def test_a_directory_that_all_nodes_share(sandbox: Sandbox, mend: Path) -> None:
    from your_module import my_trainable  # type: ignore[import-not-found]

    mend.touch()
    tuner = tune.Tuner(
        my_trainable,
        run_config=air.RunConfig(
            name="experiment_name", local_dir=str(sandbox.storage), sync_config=tune.SyncConfig(syncer=None)
        ),
    )
    assert tuner.fit()[0].path.startswith(str(sandbox.storage / "experiment_name"))


@pytest.mark.filterwarnings("ignore:holdfast.init.address:UserWarning")
def test_a_bucket_and_restoring_from_it(
    sandbox: Sandbox, mend: Path, moto: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from your_module import my_trainable

    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    bucket = moto.uri(moto.new_bucket(), "sub-path")
    holdfast.init(address="10.0.0.1:6379")
    tuner = tune.Tuner(
        my_trainable,
        run_config=air.RunConfig(
            name="my-tune-exp",
            local_dir=str(sandbox.storage),
            sync_config=tune.SyncConfig(upload_dir=bucket, syncer="auto"),
            checkpoint_config=air.CheckpointConfig(checkpoint_score_attribute="max-auc", num_to_keep=5),
        ),
    )
    assert tuner.fit().num_errors == 1
    assert not sandbox.storage.exists() or not list(sandbox.storage.iterdir())
    mend.touch()
    tuner = tune.Tuner.restore(join(bucket, "my-tune-exp"), resume_errored=True)
    check(tuner.fit(), [f"checkpoint_00000{n}" for n in range(3, 8)])
    holdfast.shutdown()


def test_no_shared_storage_and_restoring_from_the_head(sandbox: Sandbox, mend: Path) -> None:
    from your_module import my_trainable

    holdfast.init()
    tuner = tune.Tuner(
        my_trainable,
        run_config=RunConfig(
            name="my-tune-exp",
            local_dir=str(sandbox.storage),
            sync_config=tune.SyncConfig(syncer="auto", sync_on_checkpoint=False, sync_period=60),
            checkpoint_config=air.CheckpointConfig(checkpoint_score_attribute="max-auc", num_to_keep=5),
        ),
    )
    assert tuner.fit().num_errors == 1
    mend.touch()
    tuner = tune.Tuner.restore(str(sandbox.storage / "my-tune-exp"), resume_errored=True)
    check(tuner.fit(), [f"checkpoint_00000{n}" for n in range(3, 8)])
    holdfast.shutdown()


class CopyTree(Syncer):
    """Copies in the very call, and fails at first."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 1

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        if self.failures:
            self.failures -= 1
            raise OSError("the link is down")
        shutil.copytree(local_dir, remote_dir.removeprefix("mine://"), dirs_exist_ok=True)
        return True


def test_a_syncer_of_the_users_mirrors_a_local_experiment(sandbox: Sandbox, mend: Path) -> None:
    """The copy is an experiment like any other once it lies where Holdfast can read it."""
    from your_module import my_trainable

    mirror = sandbox.root / "mirror"
    sync = tune.SyncConfig(upload_dir=f"mine://{mirror}", syncer=CopyTree(), sync_period=0.01)
    run_config = air.RunConfig(name="mirrored", local_dir=str(sandbox.storage), sync_config=sync)
    assert tune.Tuner(my_trainable, run_config=run_config).fit().num_errors == 1
    mend.touch()
    shutil.rmtree(sandbox.storage)
    results = tune.Tuner.restore(mirror / "mirrored", resume_errored=True).fit()
    check(results, [f"checkpoint_00000{n}" for n in range(8)])
    with pytest.raises(ConfigError, match="leave the syncer out"):
        DataParallelTrainer(lambda: None, run_config=run_config).fit()
    with pytest.raises(ConfigError, match="needs upload_dir"):
        tune.SyncConfig(syncer=CopyTree())
    remote = air.RunConfig(name="x", storage_path="s3://bucket/x", sync_config=sync)
    with pytest.raises(ConfigError, match="leave the syncer out"):
        tune.Tuner(my_trainable, run_config=remote).fit()


def test_a_trainable_is_found_again_where_its_module_was(
    sandbox: Sandbox, mend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that was started elsewhere; but not in a directory to which others may write."""
    from your_module import my_trainable

    run_config = air.RunConfig(name="found", local_dir=str(sandbox.storage))
    assert tune.Tuner(my_trainable, run_config=run_config).fit().num_errors == 1
    mend.touch()
    where = mend.parent
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(where)])
    monkeypatch.delitem(sys.modules, "your_module")
    where.chmod(0o777)
    with pytest.raises(ConfigError, match=r"your_module:my_trainable, which cannot be imported.*trainable="):
        tune.Tuner.restore(sandbox.storage / "found")
    assert str(where) not in sys.path
    where.chmod(0o755)
    results = tune.Tuner.restore(sandbox.storage / "found", resume_errored=True).fit()
    check(results, [f"checkpoint_00000{n}" for n in range(8)])


def test_a_secret_of_the_space_is_not_stored_and_is_asked_for(sandbox: Sandbox) -> None:
    """The same call has it again; a restored experiment needs it. What is drawn is stored, whatever its name."""
    bad = sandbox.root / "bad"
    bad.touch()

    def use(config: dict[str, Any]) -> None:
        assert config["login"]["password"] == "hush" and config["keys"] == ["a", {"api_key": "hush"}]
        if bad.exists():
            raise ValueError("not yet")
        tune.report({"secret_size": config["secret_size"]})

    space = {
        "login": {"user": "me", "password": "hush"},
        "keys": ["a", {"api_key": "hush"}],
        "secret_size": tune.grid_search([1, 2]),
    }

    def tuner() -> tune.Tuner:
        return tune.Tuner(
            use, param_space=space, run_config=tune.RunConfig(name="secret", storage_path=sandbox.storage)
        )

    assert tuner().fit().num_errors == 2
    for file in (sandbox.storage / "secret").rglob("*"):
        assert file.is_dir() or b"hush" not in file.read_bytes(), file
    bad.unlink()
    with pytest.raises(ConfigError, match=r"a secret, which cannot be stored.*param_space="):
        tune.Tuner.restore(sandbox.storage / "secret", use, restart_errored=True)
    results = tune.Tuner.restore(sandbox.storage / "secret", use, restart_errored=True, param_space=space).fit()
    assert [one.metrics["secret_size"] for one in results if one.metrics] == [1, 2]
    assert len(tuner().fit()) == 2

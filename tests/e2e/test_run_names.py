"""A run and its checkpoints are found again by the paths that `fit()` gives out, whatever the run's name holds."""

from __future__ import annotations

import pytest
from tests.contract import servers
from tests.e2e.small import save, value_of
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.storage.locate import open_store
from holdfast.storage.uri import join, split
from holdfast.train import Checkpoint, Result, RunConfig, ScalingConfig

_NAMES = ["a?b", "x%20y", "x y", "a#b", "50%", "%2F", "a+b=c&d", "a;b:c", "größe", "[x]", "a@b", "~x", "s3:x"]
_KINDS = ["path", "file", "s3"]
_S3_NAMES = ["a?b", "x%20y", "a#b", "%2F", "größe"]
"""Each run on S3 takes a second or two; these names need the most care in URIs."""


@pytest.fixture
def storage(request: pytest.FixtureRequest, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> str:
    sandbox.storage.mkdir()
    if request.param == "s3":
        server: servers.Server = request.getfixturevalue("moto")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return server.uri(server.new_bucket(), "runs of mine")
    return str(sandbox.storage) if request.param == "path" else sandbox.storage.as_uri()


def _trainer(storage: str, name: str, workers: int = 0) -> train.DataParallelTrainer:
    def work() -> str:
        save(7)
        return train.get_context().get_trial_name()

    return train.DataParallelTrainer(
        work,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=storage),
    )


@pytest.mark.parametrize(
    ("storage", "name"),
    [(kind, name) for kind in _KINDS for name in (_S3_NAMES if kind == "s3" else _NAMES)],
    indirect=["storage"],
)
def test_a_run_is_opened_again_by_every_path_that_names_it(storage: str, name: str) -> None:
    decoy = {"x%20y": "x y", "%2F": "b", "a?b": "a", "a#b": "a"}.get(name)
    result = _trainer(storage, name).fit()
    assert result.return_value == name
    found = [
        result,
        Result.from_path(result.path, result.filesystem),
        Result.from_path(join(storage, name)),
        Result.from_path(open_store(storage).sub(name).uri),
    ]
    for one in found:
        assert one.path == result.path
        assert one.return_value == name
        assert one.checkpoint is not None and value_of(one.checkpoint) == 7
        assert value_of(Checkpoint(one.checkpoint.path, one.checkpoint.filesystem)) == 7
        assert one.checkpoint == result.checkpoint
    assert train.DataParallelTrainer.can_restore(join(storage, name))
    assert split(join(storage, name)) == (storage, name)
    assert _trainer(storage, name).fit().path == result.path
    assert open_store(storage).children() == [name]
    if decoy is not None:
        with pytest.raises(RuntimeError, match="doesn't exist"):
            Result.from_path(join(storage, decoy))


@pytest.mark.parametrize("storage", _KINDS, indirect=True)
def test_workers_store_under_the_same_name_as_the_driver(storage: str) -> None:
    result = _trainer(storage, "a?b%20 c", workers=1).fit()
    assert result.checkpoint is not None and value_of(result.checkpoint) == 7
    assert open_store(storage).children() == ["a?b%20 c"]
    restored = train.DataParallelTrainer.restore(join(storage, "a?b%20 c"), lambda: None)
    assert restored.run_config.name == "a?b%20 c"
    assert restored.run_config.storage_path == storage

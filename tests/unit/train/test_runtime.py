"""`holdfast.init()` and what `import holdfast` alone gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.engines.engine import EngineName
from holdfast.errors import ConfigError
from holdfast.train import DataParallelTrainer, RunConfig
from holdfast.train.engine_choice import asked_engine, client_address
from holdfast.train.request import build_request


@pytest.fixture(autouse=True)
def _not_initialized() -> Iterator[None]:
    yield
    holdfast.shutdown()


def environment_of(run_config: RunConfig | None = None) -> dict[str, str]:
    trainer = DataParallelTrainer(lambda: None, run_config=run_config)
    found = dict(build_request(trainer, False, None, ()).environment)
    assert found.pop("TUNE_ORIG_WORKING_DIR") == str(Path.cwd())
    return found


def test_init_and_shutdown() -> None:
    assert not holdfast.is_initialized()
    holdfast.init(num_cpus=4, ignore_reinit_error=True, include_dashboard=False)
    holdfast.init()
    assert holdfast.is_initialized()
    holdfast.shutdown()
    assert not holdfast.is_initialized()
    with holdfast.init("auto") as info:
        assert holdfast.is_initialized() and info["address"] == info.address_info["address"] == "local"
    assert not holdfast.is_initialized()


def test_variables_given_to_init_reach_the_workers_of_every_run() -> None:
    holdfast.init(runtime_env={"env_vars": {"A": "1", "B": "1"}, "pip": ["x"]})
    mine = RunConfig(worker_runtime_env={"env_vars": {"B": "2"}})
    assert (environment_of(), environment_of(mine)) == ({"A": "1", "B": "1"}, {"A": "1", "B": "2"})
    holdfast.shutdown()
    assert environment_of() == {}


def test_what_init_cannot_do_is_told() -> None:
    with pytest.warns(UserWarning, match=r"init\(address='head:6379'\) has no effect: .* set HOLDFAST_ENGINE=ray"):
        holdfast.init(address="head:6379")
    with pytest.raises(ConfigError, match=r"holdfast.init\(runtime_env\) must be a dict"):
        holdfast.init(runtime_env={"env_vars": ["A"]})


def test_with_the_address_of_a_ray_cluster_for_clients_runs_are_on_it_until_shutdown() -> None:
    with holdfast.init(address="ray://head:10001") as info:
        assert info["address"] == client_address() == "ray://head:10001"
        assert asked_engine(None) is EngineName.RAY and asked_engine("local") is EngineName.LOCAL
    assert client_address() is None and asked_engine(None) is None


@pytest.mark.parametrize("address, told", [("ray://head:10001", "ray://head:10001"), ("head:6379", None), ("", None)])
def test_the_address_for_clients_may_be_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, address: str, told: str | None
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert client_address() == told


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("remote", "holdfast has no `remote`: Holdfast runs training functions, not tasks and actors"),
        ("data", "holdfast has no `data`: give datasets=... a list"),
        ("nonsense", "module 'holdfast' has no attribute 'nonsense'"),
    ],
)
def test_what_is_not_here_says_so(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(holdfast, name)
    assert not hasattr(holdfast, name)


def test_import_holdfast_alone_gives_the_training_api_lazily() -> None:
    program = (
        "import sys, holdfast; assert 'holdfast.train' not in sys.modules;"
        "assert holdfast.train.RunConfig and holdfast.train.torch.TorchTrainer and 'init' in dir(holdfast)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

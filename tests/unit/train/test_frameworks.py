"""The packages of the frameworks, as far as they go without the frameworks themselves."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.errors import ConfigError, MissingExtra
from holdfast.train import rendezvous
from holdfast.train.boosting import BoosterReports
from holdfast.worker.job import Assignment

_PACKAGES = ["lightning", "huggingface.transformers", "xgboost", "lightgbm", "jax", "v2.jax"]
_FRAMEWORKS = {"lightning", "pytorch_lightning", "transformers", "xgboost", "lightgbm", "jax", "torch", "numpy"}


@pytest.mark.parametrize("package", _PACKAGES)
def test_importing_a_package_does_not_import_its_framework(package: str) -> None:
    program = f"import sys, holdfast.train.{package} as found; dir(found); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not _FRAMEWORKS.intersection(done.stdout.split())


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("lightning", "RayDDPStrategy", "lightning"),
        ("huggingface.transformers", "prepare_trainer", "transformers"),
        ("xgboost", "XGBoostTrainer", "xgboost"),
        ("lightgbm", "LightGBMTrainer", "lightgbm"),
        ("jax", "JaxTrainer", "jax"),
    ],
)
def test_a_missing_framework_is_one_sentence_with_the_command(
    package: str, name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"holdfast.train.{package}")
    monkeypatch.delitem(vars(module), name, raising=False)
    for framework in _FRAMEWORKS:
        monkeypatch.delitem(sys.modules, framework, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf"run: pip install 'holdfast\[{extra}\]'"):
        getattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


class _Session:
    """The part of a worker's session that an exchange needs, among threads."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._value: Any = None

    def broadcast_from_rank_zero(self, value: Any) -> Any:
        if value is not None:
            self._value = value
        self._barrier.wait(60)
        return self._value


def _assignment(rank: int, world_size: int) -> Assignment:
    return Assignment(
        generation=1,
        rank=rank,
        local_rank=rank,
        node_rank=0,
        world_size=world_size,
        local_world_size=world_size,
        node_count=1,
        master_address="localhost",
        master_port=0,
        restart_count=0,
        max_restarts=0,
        checkpoint=None,
        storage="",
        experiment="",
        trial_id="",
        trial_dir="",
        work_dir="",
        staging_dir="",
        temp_dir="",
        error_file="",
        change_directory=False,
    )


@pytest.mark.parametrize("listens", [True, False], ids=["the agent's socket", "torchrun"])
def test_every_rank_learns_the_addresses_of_all(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session = _Session(3)
    monkeypatch.setattr(rendezvous, "current", lambda: session)
    fd = socket.create_server(("127.0.0.1", 0)).detach() if listens else None

    def exchange(rank: int) -> list[str]:
        return rendezvous.exchange_addresses(_assignment(rank, 3), fd if rank == 0 else None, 1000 + rank)

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(exchange, range(3)))
    assert answers == [["127.0.0.1:1000", "127.0.0.1:1001", "127.0.0.1:1002"]] * 3


def test_strangers_take_no_part_in_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _Session(2)
    monkeypatch.setattr(rendezvous, "current", lambda: session)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    for line in (b"", b"GET / HTTP/1.0\n", b'["wrong", 1, 99]\n', b"7\n", b'["\xc3\xa9", 1, 99]\n'):
        with socket.create_connection(address) as stranger:
            stranger.sendall(line)
    fd = listener.detach()

    def exchange(rank: int) -> list[str]:
        return rendezvous.exchange_addresses(_assignment(rank, 2), fd if rank == 0 else None, 1000 + rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, range(2))) == [["127.0.0.1:1000", "127.0.0.1:1001"]] * 2


def test_a_free_port_is_not_one_that_the_kernel_gives_away() -> None:
    port = rendezvous.find_free_port("127.0.0.1")
    socket.create_server(("127.0.0.1", port)).close()
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:  # noqa: PTH123
        first, last = map(int, file.read().split())
    assert not first <= port <= last or first < 22000


def test_metrics_are_chosen_and_renamed() -> None:
    found = {"train-rmse": 1.0, "test-rmse": 2.0}
    assert BoosterReports()._select(found) == found
    assert BoosterReports("test-rmse")._select(found) == {"test-rmse": 2.0}
    assert BoosterReports(["train-rmse"])._select(found) == {"train-rmse": 1.0}
    doubled = BoosterReports({"loss": "test-rmse"}, results_postprocessing_fn=lambda row: {"twice": 2 * row["loss"]})
    assert doubled._select(found) == {"twice": 4.0}
    with pytest.raises(ConfigError, match=r"names 'rmse', but the evaluation gave test-rmse, train-rmse"):
        BoosterReports("rmse")._select(found)

"""`prepare_model`, `prepare_data_loader` and the process group, with real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from holdfast.errors import ConfigError
from holdfast.train.torch import enable_reproducibility, get_device, get_devices, prepare_data_loader, prepare_model
from holdfast.train.torch.group import _check_backend
from holdfast.train.torch.loaders import _OnDevice, _shared_out

ROOT = Path(__file__).parents[3]
WORKER = """
import json, os, signal, sys
import torch, torch.distributed as dist
from holdfast.train.torch import prepare_data_loader, prepare_model
from holdfast.train.torch.group import TorchGroup
from tests.unit.worker.fake_agent import make_assignment

rank, port, fd, scenario = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
group = TorchGroup(None, 60)
group.setup(make_assignment(rank=rank, world_size=2, master_port=port), fd if rank == 0 else None)
if scenario == "peer dies" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if scenario == "peer dies":
    work = dist.all_reduce(torch.ones(1), async_op=True)
    group.shutdown()
    os._exit(0)
torch.manual_seed(0)
model = prepare_model(torch.nn.Linear(1, 1, bias=False))
loader = prepare_data_loader(torch.utils.data.DataLoader(torch.arange(6.0).reshape(6, 1), batch_size=3))
(batch,) = loader
model(batch).sum().backward()
print(json.dumps([type(model).__name__, sorted(batch.flatten().tolist()), model.module.weight.grad.item(),
                  dist.get_backend(), dist.get_world_size()]))
group.shutdown()
print(json.dumps(dist.is_initialized()))
"""


def workers(scenario: str) -> list[subprocess.Popen[str]]:
    """Two ranks as processes; rank 0 inherits the listening socket, as from an agent."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port, fd = listening.getsockname()[1], listening.fileno()
        return [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(rank), str(port), str(fd), scenario],
                pass_fds=[fd] if rank == 0 else [],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(2)
        ]


def test_two_workers_train_the_same_model() -> None:
    told = [process.communicate(timeout=100)[0].splitlines() for process in workers("train")]
    first, second = (json.loads(lines[0]) for lines in told)
    assert first == ["DistributedDataParallel", [0.0, 2.0, 4.0], 7.5, "gloo", 2]
    assert second == ["DistributedDataParallel", [1.0, 3.0, 5.0], 7.5, "gloo", 2]
    assert [json.loads(lines[1]) for lines in told] == [False, False]


def test_shutdown_does_not_wait_for_a_dead_peer() -> None:
    survivor, dead = workers("peer dies")
    dead.communicate(timeout=100)
    assert dead.returncode == -signal.SIGKILL
    survivor.communicate(timeout=100)
    assert survivor.returncode == 0


def test_one_worker_needs_no_wrapping() -> None:
    model = torch.nn.Linear(2, 2)
    assert prepare_model(model) is model
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
    assert prepare_data_loader(loader) is loader
    with pytest.raises(ConfigError, match='must be "ddp", "fsdp" or None'):
        prepare_model(model, parallel_strategy="zero")  # type: ignore[arg-type]


def test_without_gpus_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_USE_GPU", raising=False)
    assert get_device() == torch.device("cpu")
    assert get_devices() == [torch.device("cpu")]


def numbers(loader: DataLoader[Any]) -> list[float]:
    return [value for (batch,) in loader for value in batch.flatten().tolist()]


@pytest.mark.parametrize("shuffle", [False, True])
def test_shards_of_a_data_loader_are_disjoint_and_stay_shuffled(shuffle: bool) -> None:
    dataset = TensorDataset(torch.arange(20.0))
    shares = [_shared_out(DataLoader(dataset, batch_size=4, shuffle=shuffle), 2, rank) for rank in range(2)]
    assert sorted(numbers(shares[0]) + numbers(shares[1])) == list(range(20))
    ordered = [list(range(rank, 20, 2)) for rank in range(2)]
    assert ([numbers(share) for share in shares] == ordered) is not shuffle
    before = numbers(shares[0])
    shares[0].sampler.set_epoch(1)
    assert (numbers(shares[0]) != before) is shuffle


def test_settings_of_the_data_loader_are_kept() -> None:
    loader: DataLoader[Any] = DataLoader(
        TensorDataset(torch.arange(21.0)), batch_size=4, drop_last=True, collate_fn=len, timeout=0, num_workers=0
    )
    shared = _shared_out(loader, 2, 0)
    assert (shared.batch_size, shared.drop_last, shared.collate_fn) == (4, True, len)
    assert list(shared) == [4, 4]
    assert shared.in_order and not _shared_out(DataLoader(range(4), in_order=False), 2, 0).in_order


class _Stream(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return iter(range(3))


def test_loaders_that_cannot_be_sharded_are_kept_or_refused() -> None:
    stream: DataLoader[Any] = DataLoader(_Stream())
    assert _shared_out(stream, 2, 0) is stream
    dataset: Dataset[Any] = TensorDataset(torch.arange(8.0))
    once = _shared_out(DataLoader(dataset), 2, 0)
    assert _shared_out(once, 2, 0) is once

    class Mine(BatchSampler):  # type: ignore[misc]
        """A batch sampler of the user's own."""

    own: DataLoader[Any] = DataLoader(dataset, batch_sampler=Mine(range(8), 2, False))
    with pytest.raises(ConfigError, match="batch_sampler Mine: make that sampler aware of ranks"):
        _shared_out(own, 2, 0)
    with pytest.warns(UserWarning, match="replaces the sampler SubsetRandomSampler"):
        _shared_out(DataLoader(dataset, sampler=SubsetRandomSampler([1, 2])), 2, 0)


def test_batches_of_any_structure_are_moved_to_the_device() -> None:
    loader: DataLoader[Any] = DataLoader(
        [{"x": torch.ones(1), "name": "a", "pair": (torch.ones(1), 2)}], batch_size=None
    )
    moved = _OnDevice(loader, torch.device("meta"), non_blocking=True)
    (batch,) = moved
    assert len(moved) == 1 and moved.batch_size is None
    assert (batch["x"].device.type, batch["name"], batch["pair"][1]) == ("meta", "a", 2)
    assert batch["pair"][0].device.type == "meta"


def test_enable_reproducibility_seeds_all_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        enable_reproducibility(5)
        first = torch.rand(3)
        enable_reproducibility(5)
        assert torch.equal(torch.rand(3), first)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["foo", "cpu:gloo,cuda:foo"])
def test_a_backend_that_torch_does_not_have_is_one_sentence(backend: str) -> None:
    why = rf"TorchConfig\(backend='{backend}'\): torch has no backend 'foo' here; it has .*gloo"
    with pytest.raises(ConfigError, match=why):
        _check_backend(backend, dist)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "GLOO"])
def test_a_backend_that_torch_has_is_accepted_by_any_of_its_names(backend: str) -> None:
    _check_backend(backend, dist)

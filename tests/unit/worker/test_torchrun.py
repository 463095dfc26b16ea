"""Errors between torchrun's processes, which talk over torchrun's store."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from holdfast.errors import RunError
from holdfast.worker import torchrun as module
from holdfast.worker.torchrun import Torchrun


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_store", dist.HashStore())


def _connect(rank: int, monkeypatch: pytest.MonkeyPatch) -> Torchrun:
    """As the process of that rank would, for its first run."""
    monkeypatch.setattr(module, "_runs", 0)
    places = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 1}
    others = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "MASTER_ADDR": "here", "MASTER_PORT": 1}
    one = Torchrun({name: str(value) for name, value in (places | sizes | others).items()})
    one.connect()
    return one


def test_a_store_that_holds_the_messages_of_an_earlier_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _connect(1, monkeypatch)
    with pytest.raises(RunError, match=r"rank 1 again .* TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        _connect(1, monkeypatch)


def test_every_rank_gets_what_rank_0_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = _connect(0, monkeypatch), _connect(1, monkeypatch)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend(one.collect("broadcast", None) for _ in range(3)))
    thread.start()
    for data in (b"\xff", {"a": [1]}, None):
        assert zero.collect("broadcast", data) == data
    thread.join()
    assert seen == [b"\xff", {"a": [1]}, None]


def test_ranks_that_do_not_meet_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = _connect(0, monkeypatch), _connect(1, monkeypatch)
    zero.fail("it is full")
    with pytest.raises(RunError, match="Rank 0 does not go on, and so rank 1 cannot: it is full"):
        one.collect("barrier", None)
    one.leave()
    with pytest.raises(RunError, match="Rank 1 has ended before rank 0 was done"):
        zero.collect("return", None)


def test_ranks_in_different_collectives_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = _connect(0, monkeypatch), _connect(1, monkeypatch)
    zero.fail("so that rank 1 does not wait")
    with pytest.raises(RunError):
        one.collect("barrier", None)
    zero._sequence = 0
    with pytest.raises(RunError, match="Rank 0 is at 'return' and rank 1 at 'barrier'"):
        zero.collect("return", None)

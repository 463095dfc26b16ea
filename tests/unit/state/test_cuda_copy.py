"""Copies from a device through pinned chunks, with a stand-in for the device."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from holdfast.checkpoint.state import cuda_copy


class Source:
    """A CPU tensor that claims to be on a device."""

    def __init__(self, tensor: torch.Tensor, contiguous: bool = True) -> None:
        self.tensor, self.contiguous = tensor, contiguous
        self.is_cuda, self.device, self.itemsize = True, "cuda:0", tensor.itemsize

    def is_contiguous(self) -> bool:
        return self.contiguous

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def view(self, *shape: int) -> torch.Tensor:
        return self.tensor.view(*shape)


class Stream:
    """Records copies in flight: they complete only when somebody waits for the stream."""

    def __init__(self, _device: Any = None) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


class Event:
    recorded = waited = 0

    def record(self, _stream: Any) -> None:
        Event.recorded += 1

    def synchronize(self) -> None:
        Event.waited += 1


@contextmanager
def stream_context(_stream: Any) -> Iterator[None]:
    yield


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(Stream=Stream, Event=Event, stream=stream_context, current_stream=lambda _: "training")
    empty = torch.empty
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: empty(size, dtype=dtype))
    monkeypatch.setattr(cuda_copy, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(cuda_copy, "_staging", {})
    Event.recorded = Event.waited = 0


@pytest.mark.parametrize("sizes", [[1], [16], [17], [100, 3, 0, 33], [5] * 7])
def test_every_chunk_is_copied_to_its_offset(sizes: list[int], fake_cuda: None) -> None:
    sources = [torch.randn(size) for size in sizes]
    targets = [torch.zeros(size) for size in sizes]
    cuda_copy.copy_from_device([(t, Source(s)) for t, s in zip(targets, sources, strict=True)])
    assert all(t.equal(s) for t, s in zip(targets, sources, strict=True))
    assert Event.recorded == Event.waited == sum(max(1, -(-size // 16)) for size in sizes)
    assert cuda_copy._staging["cuda:0"][0].waited_for == ["training"]


def test_other_tensors_are_copied_by_torch() -> None:
    target = torch.zeros(3)
    cuda_copy.copy_from_device([(target, torch.ones(3))])
    assert target.equal(torch.ones(3)) and not cuda_copy._staging

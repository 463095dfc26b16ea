"""Parallel copies are complete for any number and size of blocks, and are used for large tensors."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy
import pytest
import torch
from tests.unit.state.trips import same

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.state import parallel_copy


@pytest.mark.parametrize("sizes", [[], [1], [0, 5], [9 << 20], [32 << 20] * 3, [(64 << 20) + 1, 3, 12 << 20]])
def test_every_byte_is_copied(sizes: list[int]) -> None:
    sources = [numpy.frombuffer(os.urandom(size), "u1") for size in sizes]
    targets: list[Any] = [numpy.zeros(size, "u1") for size in sizes]
    blocks = [
        (target.ctypes.data, source.ctypes.data, source.nbytes) for target, source in zip(targets, sources, strict=True)
    ]
    parallel_copy.move(blocks)
    for target, source in zip(targets, sources, strict=True):
        assert (target == source).all()
    assert [one for one in threading.enumerate() if one.name == "holdfast-copy"] == []


def test_an_error_in_any_thread_is_raised() -> None:
    def work(piece: int) -> None:
        if piece == 3:
            raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        parallel_copy.spread(work, range(10))
    assert [one for one in threading.enumerate() if one.name == "holdfast-copy"] == []


def test_large_tensors_of_every_kind_round_trip() -> None:
    plain = torch.randn(1000, 700)
    state = {
        "plain": plain,
        "columns": plain.t(),
        "part": torch.randn(3_000_000)[100:-100],
        "expanded": torch.randn(1, 700).expand(1000, 700),
        "conjugate": torch.randn(1 << 18, dtype=torch.complex64).conj(),
        "negative": torch.randn(1 << 18, dtype=torch.complex128).conj().imag,
        "half": torch.randn(1 << 20).to(torch.bfloat16),
    }
    found = Checkpoint.from_state(state).load_state()
    assert same(found, {name: value.resolve_conj().resolve_neg() for name, value in state.items()})

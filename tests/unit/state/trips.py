"""Round trips of a state through a directory or memory, and a bit-exact comparison."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import torch

from holdfast.checkpoint.state.load import load_state
from holdfast.checkpoint.state.plan import Plan, plan

__all__ = ["bits", "contents", "in_memory", "on_disk", "same"]


def on_disk(state: Any, directory: Path, **how: Any) -> Any:
    """Written as files and read back."""
    plan(state).write_files(directory)
    return load_state(lambda name: directory / name, **how)


def contents(planned: Plan) -> dict[str, bytes]:
    """Each file's bytes, as they lie in a buffer that was not clean before."""
    buffer = bytearray(b"\xa5" * planned.size_bytes)
    planned.write_into(memoryview(buffer))
    return {file.path: bytes(buffer[file.offset : file.offset + file.size]) for file in planned.files}


def in_memory(state: Any, **how: Any) -> Any:
    """Copied into a buffer and read back from there."""
    files = contents(plan(state))
    return load_state(lambda name: memoryview(files[name]), **how)


def bits(tensor: torch.Tensor) -> bytes:
    """What a tensor's elements are, whatever its strides; for dtypes without any arithmetic too."""
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.dtype.itemsize)
    resolved = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.is_complex:
        resolved = torch.view_as_real(resolved)
        carrier = {2: torch.int16, 4: torch.int32, 8: torch.int64}[resolved.dtype.itemsize]
    assert carrier is not None
    content: bytes = resolved.view(carrier).contiguous().numpy().tobytes()
    return content


def same(one: Any, other: Any) -> bool:
    """The same types all the way down, and the same bits."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and bits(one) == bits(other)
    if isinstance(one, numpy.ndarray | numpy.generic):
        return type(one) is type(other) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and [(type(k), k) for k in one] == [(type(k), k) for k in other]
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return type(one) is type(other) and bool(one == other)

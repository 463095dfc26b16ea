"""`sharded.json`: which parts of a tensor lie in which rank's files, for states that several ranks wrote together.

Pure: `sharded_plan` writes it from the ranks' common plan, `load` reads it. Offsets and sizes are those of the stored
form, so a dtype that the format has no name for has its trailing dimension of bytes here too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.checkpoint.state.dtypes import BY_CODE
from holdfast.errors import Damaged, UnsupportedFormat

__all__ = ["FORMAT", "INDEX", "VERSION", "Chunk", "ShardedTensor", "build_index", "read_index"]

INDEX = "sharded.json"
FORMAT = "holdfast-sharded"
VERSION = 1


class Chunk(NamedTuple):
    """A part of a tensor: where in the whole it begins, how large it is, and what it is called in which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str


class ShardedTensor(NamedTuple):
    """A tensor by its parts, which cover it without overlap. An empty tensor has none."""

    code: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def build_index(tensors: Mapping[str, ShardedTensor]) -> bytes:
    """The file's bytes."""
    listed = {
        name: {"dtype": tensor.code, "shape": tensor.shape, "chunks": [chunk._asdict() for chunk in tensor.chunks]}
        for name, tensor in sorted(tensors.items())
    }
    return msgspec.json.encode({"format": FORMAT, "version": VERSION, "tensors": listed})


class _ChunkForm(msgspec.Struct):
    offsets: list[int]
    sizes: list[int]
    file: str
    name: str


class _TensorForm(msgspec.Struct):
    dtype: str
    shape: list[int]
    chunks: list[_ChunkForm]


class _IndexForm(msgspec.Struct):
    format: str
    version: int
    tensors: dict[str, Any]


def read_index(data: bytes | memoryview, where: str) -> dict[str, ShardedTensor]:
    """What `build_index` wrote, checked: every part inside its tensor, and together as large as that."""
    try:
        form = msgspec.json.decode(data, type=_IndexForm)
        if form.format != FORMAT:
            raise ValueError("it has another format")
        if form.version > VERSION:
            raise UnsupportedFormat(
                f"{where} has version {form.version}, and this Holdfast reads up to {VERSION}: upgrade it."
            )
        return {name: _checked(name, msgspec.convert(item, _TensorForm)) for name, item in form.tensors.items()}
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where} is no index of shards ({error}): use another checkpoint.") from None


def _checked(name: str, form: _TensorForm) -> ShardedTensor:
    if form.dtype not in BY_CODE or min(form.shape, default=0) < 0:
        raise ValueError(f"{name!r:.100} has no proper dtype and shape")
    chunks = tuple(Chunk(tuple(c.offsets), tuple(c.sizes), c.file, c.name) for c in form.chunks)
    if any(not _is_inside(chunk, form.shape) for chunk in chunks):
        raise ValueError(f"{name!r:.100} has a part outside of itself")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(form.shape):
        raise ValueError(f"{name!r:.100} is not the sum of its parts")
    if _overlap(chunks):
        raise ValueError(f"{name!r:.100} has two parts at the same place")
    return ShardedTensor(form.dtype, tuple(form.shape), chunks)


def _is_inside(chunk: Chunk, shape: Sequence[int]) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
        offset >= 0 and size > 0 and offset + size <= length
        for offset, size, length in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two parts share an element: a sweep along the dimension that tells most of them apart."""
    if len(chunks) < 2:
        return False
    dims = range(len(chunks[0].offsets))
    if not dims:
        return True
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    near: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        near = [other for other in near if other.offsets[along] + other.sizes[along] > chunk.offsets[along]]
        if any(all(_meet(chunk, other, dim) for dim in dims) for other in near):
            return True
        near.append(chunk)
    return False


def _meet(one: Chunk, other: Chunk, dim: int) -> bool:
    return (
        one.offsets[dim] < other.offsets[dim] + other.sizes[dim]
        and other.offsets[dim] < one.offsets[dim] + one.sizes[dim]
    )

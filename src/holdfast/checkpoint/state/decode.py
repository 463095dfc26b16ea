"""Make tensors and arrays from the bytes of a file, without a copy where the memory is ours and lies well.

A file that was mapped privately is ours: its pages are read when they are touched and copied when they are written
to. Memory that somebody else will use again is copied. `load` finds the bytes; `tensors` is the way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast.checkpoint.state.dtypes import BY_CODE, RAW
from holdfast.checkpoint.state.safetensors import DATA_ALIGNMENT, TensorInfo
from holdfast.checkpoint.state.shard_index import Chunk, ShardedTensor
from holdfast.checkpoint.state.tensors import carrier_of
from holdfast.errors import Damaged, MissingExtra

__all__ = [
    "Piece",
    "Reference",
    "join_pieces",
    "load_numpy",
    "load_torch",
    "view_tensor",
    "make_array",
    "make_tag",
    "make_tensor",
    "read_part",
    "read_reference",
]

_NUMPY_DTYPE = re.compile(r"[<>|][biufcMmUS][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")


class Piece(NamedTuple):
    """A tensor's bytes, and whether their memory is the reader's own."""

    memory: memoryview
    stored: TensorInfo
    own: bool


class Reference(NamedTuple):
    """A decoded reference of the skeleton to a leaf."""

    name: str
    is_tensor: bool
    is_scalar: bool
    dtype: Any
    """The dtype of torch or numpy."""
    shape: tuple[int, ...]


def load_torch() -> Any:
    """torch, or an error that says that it is missing."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("This checkpoint holds torch tensors; run: pip install 'holdfast[torch]'") from None
    return torch


def load_numpy() -> Any:
    """numpy, or an error that says that it is missing."""
    try:
        import numpy
    except ImportError:
        raise MissingExtra("This checkpoint holds numpy arrays; run: pip install numpy") from None
    return numpy


def read_reference(node: dict[str, Any], find: Callable[[str], ShardedTensor | None], where: str) -> Reference | None:
    """The reference in a tagged node, if it is one; `find` returns what is stored under a name."""
    is_tensor = "$tensor" in node
    if not is_tensor and "$array" not in node:
        return None
    name = node["$tensor" if is_tensor else "$array"]
    stored = find(name) if type(name) is str else None
    if stored is None:
        raise _damaged(where, f"it refers to a tensor {name!r:.100} that no file holds")
    code, shape = stored.code, stored.shape
    given = node.get("dtype")
    dtype = _torch_dtype(given, code, where) if is_tensor else _numpy_dtype(given, code, where)
    if given is not None:
        if code != RAW or not shape or shape[-1] != dtype.itemsize:
            raise _damaged(where, f"{name!r:.100} is not stored as the {given} that it should be")
        shape = shape[:-1]
    return Reference(name, is_tensor, node.get("scalar") is True, dtype, shape)


def make_tag(node: dict[str, Any], where: str) -> Any:
    """torch's own plain values."""
    torch = load_torch()
    try:
        if "$dtype" in node:
            return _torch_dtype(node["$dtype"], "", where)
        if "$device" in node and type(node["$device"]) is str:
            return torch.device(node["$device"])
        if "$size" in node:
            return torch.Size(node["$size"])
    except (RuntimeError, TypeError, ValueError, OverflowError):
        pass
    raise _damaged(where, f"the tag {next(iter(node))!r:.100} is unknown or holds nonsense")


def make_tensor(reference: Reference, piece: Piece) -> Any:
    """The tensor whose bytes `piece` holds."""
    torch = load_torch()
    dtype = reference.dtype
    if 0 in reference.shape:
        return _empty(torch, reference.shape, dtype)
    flat, own = _view(torch, piece, dtype)
    # Where a tensor begins decides in which order BLAS adds. So it is where torch would have put it, and training goes
    # on with the same bits whether its state came from a file or from memory. Large tensors are so in their files.
    is_aligned = flat.data_ptr() % DATA_ALIGNMENT == 0
    return (flat if own and is_aligned else flat.clone()).view(dtype).view(reference.shape)


def view_tensor(reference: Reference, piece: Piece) -> Any:
    """The same tensor, as a view of the piece's memory where possible: to be copied from at once."""
    torch = load_torch()
    if 0 in reference.shape:
        return _empty(torch, reference.shape, reference.dtype)
    return _view(torch, piece, reference.dtype)[0].view(reference.dtype).view(reference.shape)


def join_pieces(reference: Reference, pieces: Sequence[tuple[Chunk, Piece]]) -> Any:
    """The whole tensor of which each piece is a part."""
    torch = load_torch()
    carrier = carrier_of(torch, reference.dtype)
    whole = _empty(torch, reference.shape, carrier)
    for chunk, piece in pieces:
        part = whole
        for dim in range(len(reference.shape)):
            part = part.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
        part.copy_(_view(torch, piece, carrier)[0].view(carrier).view(part.shape))
    return whole.view(reference.dtype)


def read_part(reference: Reference, chunk: Chunk, piece: Piece) -> Any:
    """A piece as a tensor of its carrier's dtype, to be copied from: it may be memory that is not ours."""
    torch = load_torch()
    carrier = carrier_of(torch, reference.dtype)
    return _view(torch, piece, carrier)[0].view(carrier).view(chunk.sizes[: len(reference.shape)])


def make_array(reference: Reference, piece: Piece | None) -> Any:
    """The array, or the scalar as one of no dimensions, whose bytes `piece` holds."""
    numpy = load_numpy()
    if piece is None or 0 in reference.shape:
        return numpy.empty(reference.shape, reference.dtype)
    start, end = piece.stored.start, piece.stored.end
    if piece.own:
        return numpy.ndarray(reference.shape, reference.dtype, piece.memory, start)
    return numpy.ndarray(reference.shape, reference.dtype, bytearray(piece.memory[start:end]))


def _empty(torch: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Make it through bytes: torch warns about creating tensors of dtypes that it supports only in part."""
    return torch.empty((*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)


def _view(torch: Any, piece: Piece, dtype: Any) -> tuple[Any, bool]:
    """The piece as a flat tensor of bytes over its own memory, if elements of `dtype` can be seen in that; else over a
    copy. And whether that memory is ours."""
    start, end = piece.stored.start, piece.stored.end
    if piece.memory.readonly or start % dtype.itemsize:
        return torch.frombuffer(bytearray(piece.memory[start:end]), dtype=torch.uint8), True
    return torch.frombuffer(piece.memory, dtype=torch.uint8, count=end - start, offset=start), piece.own


def _torch_dtype(given: Any, code: str, where: str) -> Any:
    torch = load_torch()
    name = BY_CODE[code].torch if given is None else given
    dtype = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(dtype, torch.dtype):
        raise _damaged(where, f"this torch has no dtype {name!r:.100}")
    return dtype


def _numpy_dtype(given: Any, code: str, where: str) -> Any:
    numpy = load_numpy()
    name = BY_CODE[code].numpy if given is None else given
    try:
        if type(name) is not str or not _NUMPY_DTYPE.fullmatch(name):
            raise ValueError(name)
        return numpy.dtype(name)
    except (TypeError, ValueError):
        raise _damaged(where, f"this numpy has no dtype {name!r:.100}") from None


def _damaged(where: str, reason: str) -> Damaged:
    return Damaged(f"{where} does not describe a state ({reason}): use another checkpoint.")

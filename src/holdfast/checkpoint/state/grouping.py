"""Which tensor goes into which file, and where: a pure function of names, types and shapes.

A large tensor has a file of its own and small ones share, so that what did not change since the last checkpoint lies
in files that did not change either, and those are never written or uploaded again. `plan` puts the files one after
the other into one buffer, each at the boundary that direct I/O asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from holdfast.checkpoint.state.safetensors import build_header

__all__ = ["FILE_ALIGNMENT", "GROUP_BYTES", "TensorFile", "Spot", "Tensor", "group", "round_up"]

FILE_ALIGNMENT = 4096
GROUP_BYTES = 16 * 2**20


class Tensor(NamedTuple):
    """A tensor to be stored: its name and element code in the file, its shape there, and its size."""

    name: str
    code: str
    shape: tuple[int, ...]
    size_bytes: int
    alignment: int


class Spot(NamedTuple):
    """The offset of a tensor in its file; `number` is its position in the given sequence."""

    number: int
    offset: int


class TensorFile(NamedTuple):
    """One file."""

    path: str
    header: bytes
    spots: tuple[Spot, ...]
    size_bytes: int


def group(tensors: Sequence[Tensor], name_of: Callable[[int, int], str]) -> list[TensorFile]:
    """The files that hold `tensors`; `name_of` gives the path of the n-th (from 1) of all."""
    parts = list(_split(tensors))
    return [_lay_out(tensors, part, name_of(at, len(parts))) for at, part in enumerate(parts, 1)]


def round_up(size_bytes: int) -> int:
    """Round up to where the next file of a buffer may begin."""
    return -(-size_bytes // FILE_ALIGNMENT) * FILE_ALIGNMENT


def _split(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    small: list[int] = []
    filled = 0
    for number, tensor in enumerate(tensors):
        if tensor.size_bytes >= GROUP_BYTES:
            yield [number]
            continue
        if small and filled + tensor.size_bytes > GROUP_BYTES:
            yield small
            small, filled = [], 0
        small.append(number)
        filled += tensor.size_bytes
    if small:
        yield small


def _lay_out(tensors: Sequence[Tensor], numbers: list[int], path: str) -> TensorFile:
    """Sort by element size, largest first: then every tensor is aligned without padding."""
    ordered = sorted(numbers, key=lambda number: (-tensors[number].alignment, tensors[number].name))
    header = build_header((tensors[n].name, tensors[n].code, tensors[n].shape, tensors[n].size_bytes) for n in ordered)
    spots = []
    at = len(header)
    for number in ordered:
        spots.append(Spot(number, at))
        at += tensors[number].size_bytes
    return TensorFile(path, header, tuple(spots), at)

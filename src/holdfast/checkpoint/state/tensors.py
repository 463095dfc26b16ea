"""Describe tensors and arrays, find aliases, and copy them into a buffer.

This and `decode` (the way back), `cuda_copy` and `sharded_plan` are the only modules here that touch torch or numpy,
and they import neither: a state can hold a tensor only where torch is loaded already. The copy is the stall of a
checkpoint, so it is one copy each, from wherever and however strided the source is straight to its place in the buffer;
what is large and plain is left to `parallel_copy`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.checkpoint.state.cuda_copy import copy_from_device
from holdfast.checkpoint.state.dtypes import CODE_OF_NUMPY, CODE_OF_TORCH, RAW
from holdfast.checkpoint.state.flatten import NotSaveable
from holdfast.checkpoint.state.grouping import Tensor
from holdfast.checkpoint.state.parallel_copy import LARGE_BYTES, move

__all__ = ["Arrays", "CheckedArrays", "Copier", "Described", "carrier_of", "stored_as"]

_TENSOR, _ARRAY, _SCALAR, _SHARDED = "tensor", "array", "scalar", "dtensor"
_QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_RAW_NUMPY_KINDS = "biufcMmUS"


class Described(NamedTuple):
    """How a leaf is stored: torch's dtype, or the name of numpy's."""

    kind: str
    dtype: Any
    shape: tuple[int, ...]


class Arrays:
    """Recognises torch's tensors and numpy's arrays and scalars."""

    def __init__(self) -> None:
        self._known: dict[type, Any] = {}

    def leaf(self, value: Any) -> tuple[Any, ...] | None:
        """A cheap key that differs for leaves that are stored differently; `describe` interprets it."""
        features = self._known.get(type(value)) or self._known_by_kin(type(value))
        return None if features is None else features(value)

    def describe(self, features: tuple[Any, ...]) -> Described:
        """How such a leaf is stored; `NotSaveable` if it cannot be."""
        kind, dtype, shape, *more = features
        if kind == _TENSOR:
            _check_tensor(dtype, *more)
        elif kind == _SHARDED:
            _check_sharded(*more)
        else:
            _check_array(dtype)
            dtype = dtype.str
        return Described(kind, dtype, shape)

    def tag(self, value: Any) -> dict[str, Any] | None:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        return None

    def aliases(self, leaves: Sequence[Any]) -> tuple[int, ...] | None:
        """For each leaf the first one that it is the same memory as (itself, as a rule); None if all differ."""
        torch = sys.modules.get("torch")
        tensor = torch.Tensor if torch is not None else ()
        places = [(leaf.data_ptr() if isinstance(leaf, tensor) else 0) or id(leaf) for leaf in leaves]
        if len(set(places)) == len(places):
            return None
        first: dict[Any, int] = {}
        found = tuple(first.setdefault(_identity(leaf, tensor), number) for number, leaf in enumerate(leaves))
        return None if len(first) == len(leaves) else found

    def _known_by_kin(self, kind: type) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        features: Any = None
        if torch is not None and issubclass(kind, torch.Tensor):
            features = _tensor_features(torch, kind)
        elif numpy is not None and issubclass(kind, numpy.ndarray):
            features = _array_features if kind in (numpy.ndarray, numpy.memmap) else _refuse_array
        elif numpy is not None and issubclass(kind, numpy.generic):
            features = _scalar_features
        if features is not None:
            self._known[kind] = features
        return features


class CheckedArrays(Arrays):
    """The same, but each leaf is described at once: for a structure that was not seen before."""

    def leaf(self, value: Any) -> Described | None:
        features = super().leaf(value)
        return None if features is None else self.describe(features)


def _identity(leaf: Any, tensor: Any) -> Any:
    """Without memory of its own (empty, or a DTensor, of which other ranks may know other parts) it is only itself."""
    if not isinstance(leaf, tensor) or leaf.data_ptr() == 0 or leaf.numel() == 0:
        return id(leaf)
    return (leaf.data_ptr(), leaf.device, leaf.dtype, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg())


def _tensor_features(torch: Any, kind: type) -> Any:
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and issubclass(kind, distributed.DTensor):
        return lambda value: (_SHARDED, value.dtype, value.shape, value.placements, value.device_mesh)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        return _refuse_wrapper
    if issubclass(kind, torch.nn.parameter.UninitializedTensorMixin):
        return _refuse_uninitialized
    return lambda value: (_TENSOR, value.dtype, value.shape, value.layout, value.is_meta)


def _refuse_wrapper(value: Any) -> Any:
    raise NotSaveable(
        f"{type(value).__module__}.{type(value).__qualname__}, a tensor that wraps others, cannot be saved in a "
        "state: save the tensors that it is made of"
    )


def _refuse_uninitialized(value: Any) -> Any:
    raise NotSaveable("an uninitialized parameter has nothing to save: run the lazy module once before")


def _check_tensor(dtype: Any, layout: Any, is_meta: bool) -> None:
    if layout is not sys.modules["torch"].strided:
        raise NotSaveable("a sparse tensor cannot be saved in a state: write .to_dense()")
    if str(dtype).removeprefix("torch.") in _QUANTIZED:
        raise NotSaveable("a quantized tensor cannot be saved in a state: save .int_repr(), scale and zero point")
    if is_meta:
        raise NotSaveable("a meta tensor has no data that could be saved: materialize it first")


def _check_sharded(placements: Any, mesh: Any) -> None:
    if any(placement.is_partial() for placement in placements):
        raise NotSaveable("a DTensor with a partial placement is a sum that was not made yet: redistribute it first")


def _array_features(value: Any) -> tuple[Any, ...]:
    return (_ARRAY, value.dtype, value.shape)


def _scalar_features(value: Any) -> tuple[Any, ...]:
    return (_SCALAR, value.dtype, ())


def _check_array(dtype: Any) -> None:
    if dtype.kind not in _RAW_NUMPY_KINDS:
        what = "of Python objects" if dtype.kind == "O" else f"of dtype {dtype}"
        raise NotSaveable(f"an array {what} cannot be saved in a state: convert it to numbers")


def _refuse_array(value: Any) -> Any:
    raise NotSaveable(
        f"{type(value).__module__}.{type(value).__qualname__} would come back as a plain array: write numpy.asarray()"
    )


def stored_as(described: Described, name: str) -> tuple[Tensor, dict[str, Any]]:
    """What the file holds for a leaf, and the reference that stands for it in the skeleton."""
    if described.kind in (_ARRAY, _SCALAR):
        code = CODE_OF_NUMPY.get(described.dtype)
        dtype_name, width = described.dtype, sys.modules["numpy"].dtype(described.dtype).itemsize
        reference: dict[str, Any] = {"$array": name}
        if described.kind == _SCALAR:
            reference["scalar"] = True
    else:
        dtype_name, width = str(described.dtype).removeprefix("torch."), described.dtype.itemsize
        code = CODE_OF_TORCH.get(dtype_name)
        reference = {"$tensor": name}
    shape = tuple(described.shape)
    count = 1
    for length in shape:
        count *= length
    if code is None:
        code, shape = RAW, (*shape, width)
        reference["dtype"] = dtype_name
    return Tensor(name, code, shape, count * width, (width & -width) or 1), reference


def carrier_of(torch: Any, dtype: Any) -> Any:
    """The dtype as which elements are moved: some exotic ones have no copy of their own, but all have a size."""
    if str(dtype).removeprefix("torch.") in CODE_OF_TORCH or dtype.is_complex:
        return dtype
    return getattr(torch, _CARRIERS[dtype.itemsize])


class Copier:
    """The copies of all leaves of one layout, with everything worked out that does not depend on the values."""

    def __init__(self, places: Sequence[tuple[int, Described, int]]) -> None:
        """`places`: the leaf's number, what it is, and its offset in the buffer."""
        self._tensors: list[tuple[int, Any, bool, Any, tuple[int, ...], int]] = []
        self._arrays: list[tuple[int, str, tuple[int, ...], int]] = []
        for number, described, offset in places:
            if 0 in described.shape:
                continue
            if described.kind in (_ARRAY, _SCALAR):
                self._arrays.append((number, described.dtype, described.shape, offset))
                continue
            carrier = carrier_of(sys.modules["torch"], described.dtype)
            shape = described.shape
            strides = tuple(_contiguous(shape))
            at, odd = divmod(offset, carrier.itemsize)
            assert odd == 0, "every tensor begins at a multiple of its element's size"
            self._tensors.append((number, carrier, carrier is not described.dtype, shape, strides, at))

    def copy(self, leaves: Sequence[Any], buffer: memoryview) -> None:
        """Copy each leaf to its place in `buffer`."""
        if self._tensors:
            self._copy_tensors(leaves, buffer)
        if self._arrays:
            numpy = sys.modules["numpy"]
            for number, dtype, shape, offset in self._arrays:
                numpy.copyto(numpy.ndarray(shape, dtype, buffer, offset), leaves[number], casting="no")

    def _copy_tensors(self, leaves: Sequence[Any], buffer: memoryview) -> None:
        torch = sys.modules["torch"]
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        bases: dict[Any, Any] = {}
        elsewhere: list[tuple[Any, Any]] = []
        large: list[tuple[int, int, int]] = []
        with torch.no_grad():
            for number, carrier, foreign, shape, strides, at in self._tensors:
                base = bases.get(carrier)
                if base is None:
                    whole = len(raw) // carrier.itemsize * carrier.itemsize
                    base = bases[carrier] = raw[:whole].view(carrier)
                source = leaves[number]
                if foreign:
                    source = source.view(carrier)
                target = base.as_strided(shape, strides, at)
                if source.is_cpu and source.nbytes >= LARGE_BYTES and _is_plain(source):
                    large.append((target.data_ptr(), source.data_ptr(), source.nbytes))
                elif source.is_cpu:
                    target.copy_(source)
                else:
                    elsewhere.append((target, source))
            move(large)
            copy_from_device(elsewhere)


def _is_plain(source: Any) -> bool:
    """Whether its memory is, byte for byte, what is to be stored."""
    return bool(source.is_contiguous() and not source.is_conj() and not source.is_neg())


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * shape[at + 1]
    return strides

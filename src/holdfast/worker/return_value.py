"""The training function's return value as plain data and back: a typed codec, so that the driver unpickles nothing.

`bootstrap` encodes it in the worker of rank 0; it is kept in the journal; `holdfast.train.Result` decodes it. What JSON
has no word for is a dict with one key: {"$tuple": [...]}, {"$ndarray": {...}}. Everything else is refused by its type.
"""

from __future__ import annotations

import base64
import datetime
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from holdfast.worker.plain_data import plain_data

__all__ = ["decode_value", "encode_value"]

_DEPTH_MAX = 32
_ARRAY_KINDS = "biufc"
"""numpy's kinds of numbers: bool, int, unsigned, float, complex."""
_WHAT = "The return value"


def encode_value(value: Any) -> Any:
    """Raises a `TypeError` or `ValueError` that names the type of what cannot be kept."""
    return _encode(value, 0)


def _encode(value: Any, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise ValueError(f"{_WHAT} is nested deeper than {_DEPTH_MAX} levels: flatten it.")
    if value is None or isinstance(value, bool | float | str):
        return plain_data(value, _WHAT)
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else {"$int": str(int(value))}
    if isinstance(value, Mapping):
        return _encode_dict(value, depth)
    if isinstance(value, list):
        return [_encode(item, depth + 1) for item in value]
    for kind, tag in ((tuple, "$tuple"), (set, "$set"), (frozenset, "$frozenset")):
        if isinstance(value, kind):
            return {tag: [_encode(item, depth + 1) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": _base64(bytes(value))}
    if isinstance(value, datetime.timedelta):
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    for moment, tag in ((datetime.datetime, "$datetime"), (datetime.date, "$date"), (datetime.time, "$time")):
        if isinstance(value, moment):
            return {tag: value.isoformat()}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    return _encode_array(value)


def _encode_dict(value: Mapping[Any, Any], depth: int) -> Any:
    marked = len(value) == 1 and str(next(iter(value))).startswith("$")
    if all(isinstance(key, str) for key in value) and not marked:
        return {plain_data(key, _WHAT): _encode(item, depth + 1) for key, item in value.items()}
    return {"$dict": [[_encode(key, depth + 1), _encode(item, depth + 1)] for key, item in value.items()]}


def _encode_array(value: Any) -> Any:
    """numpy's scalars and arrays, torch's tensors on the CPU. Neither is imported: who has one has the library."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return _encode(value.item(), 0)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        data = _base64(value.tobytes())
        return {"$ndarray": {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}}
    if torch is not None and isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_sparse:
        whole = value.detach().contiguous()
        raw = whole.reshape(-1).view(torch.uint8) if whole.numel() else torch.empty(0, dtype=torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        data = _base64(raw.numpy().tobytes())
        return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "data": data}}
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(
        f"{_WHAT} holds {name}, which is not kept, so result.return_value is None: return plain data, arrays or CPU "
        "tensors, and report the rest as a checkpoint."
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode_value(value: Any) -> Any:
    """The inverse of `encode_value`. A value that a stranger altered raises `ValueError` at most."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(key, item)] = value.items()
        if (decode := _DECODERS.get(key)) is not None:
            return decode(item)
    return {key: decode_value(item) for key, item in value.items()}


def _decode_array(item: Any) -> Any:
    import numpy

    dtype = numpy.dtype(item["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of {dtype} is no return value")
    return numpy.frombuffer(base64.b64decode(item["data"]), dtype).reshape(item["shape"]).copy()


def _decode_tensor(item: Any) -> Any:
    import torch

    dtype = getattr(torch, item["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{item['dtype']} is no dtype")
    data = bytearray(base64.b64decode(item["data"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(item["shape"])


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": int,
    "$dict": lambda pairs: {decode_value(key): decode_value(item) for key, item in pairs},
    "$tuple": lambda items: tuple(decode_value(item) for item in items),
    "$set": lambda items: {decode_value(item) for item in items},
    "$frozenset": lambda items: frozenset(decode_value(item) for item in items),
    "$bytes": base64.b64decode,
    "$timedelta": lambda parts: datetime.timedelta(*parts),
    "$datetime": datetime.datetime.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$time": datetime.time.fromisoformat,
    "$path": Path,
    "$ndarray": _decode_array,
    "$tensor": _decode_tensor,
}

"""The safetensors format, by its specification: eight bytes of length, a JSON header, then the data without holes.

Written here and not by the library, since the data go straight into shared memory (`plan`) and never through `bytes`.
Reading trusts nothing: whatever a damaged or hostile file holds, the outcome is `Damaged` and a sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from holdfast.checkpoint.state.dtypes import BY_CODE
from holdfast.errors import Damaged

__all__ = ["DATA_ALIGNMENT", "HEADER_MAX_BYTES", "TensorInfo", "build_header", "parse_header"]

DATA_ALIGNMENT = 64
"""Where the data begin is a multiple of this: a cache line, and every element's own alignment."""
HEADER_MAX_BYTES = 100_000_000
_DIMENSIONS_MAX = 64
_METADATA = "__metadata__"


class TensorInfo(NamedTuple):
    """One tensor in a file: `start` and `end` count from where the file begins."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    end: int


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """The bytes before the data, for (name, code, shape, size in bytes) in the order of the data."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, code, shape, size_bytes in tensors:
        start, end = end, end + size_bytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    if len(text) > HEADER_MAX_BYTES:
        raise ValueError(f"a safetensors header of {len(text)} bytes is beyond the format's limit")
    return len(text).to_bytes(8, "little") + text


def parse_header(data: memoryview, where: str) -> dict[str, TensorInfo]:
    """The tensors of a whole file; `where` names it in the error."""
    try:
        return _parse(data)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise Damaged(f"{where} is no sound safetensors file ({reason}): use another checkpoint.") from None


def _parse(data: memoryview) -> dict[str, TensorInfo]:
    total = data.nbytes
    if total < 8:
        raise ValueError(f"it has only {total} bytes")
    length = int.from_bytes(data[:8], "little")
    if length > HEADER_MAX_BYTES or 8 + length > total:
        raise ValueError(f"its header claims {length} bytes")
    text = bytes(data[8 : 8 + length]).decode("utf-8")
    header = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    if not text.startswith("{") or not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not strings")
    begin = 8 + length
    found = sorted((_entry(name, item, begin) for name, item in header.items()), key=lambda entry: entry[3:])
    at = begin
    for entry in found:
        if entry.start != at:
            raise ValueError(f"{_short(entry.name)} does not begin where the one before it ends")
        at = entry.end
    if at != total:
        raise ValueError(f"it has {total} bytes where its header speaks of {at}")
    return {entry.name: entry for entry in found}


def _entry(name: str, item: Any, begin: int) -> TensorInfo:
    shape, code = item["shape"], item["dtype"]
    if type(shape) is not list or len(shape) > _DIMENSIONS_MAX or not all(_is_size(length) for length in shape):
        raise ValueError(f"{_short(name)} has no proper shape")
    if type(code) is not str or code not in BY_CODE:
        raise ValueError(f"{_short(name)} has the unknown dtype {_short(str(code))}")
    offsets = item["data_offsets"]
    if type(offsets) is not list or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise ValueError(f"{_short(name)} has no proper offsets")
    start, end = offsets
    if end - start != math.prod(shape) * BY_CODE[code].size_bytes:
        raise ValueError(f"{_short(name)} does not have the size of its shape")
    return TensorInfo(name, code, tuple(shape), begin + start, begin + end)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")

"""Element types: their names in the safetensors format, in torch and in numpy.

What the format has no name for is stored as bytes (U8) with one more dimension, and the skeleton says what it is.
Pure; `tensors` turns the names into the frameworks' own objects, `safetensors` checks sizes with them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BY_CODE", "CODE_OF_NUMPY", "CODE_OF_TORCH", "RAW", "Element"]

RAW = "U8"


class Element(NamedTuple):
    """One element type that the format has a name for."""

    size_bytes: int
    torch: str
    numpy: str | None


BY_CODE = {
    "F64": Element(8, "float64", "<f8"),
    "F32": Element(4, "float32", "<f4"),
    "F16": Element(2, "float16", "<f2"),
    "BF16": Element(2, "bfloat16", None),
    "F8_E4M3": Element(1, "float8_e4m3fn", None),
    "F8_E5M2": Element(1, "float8_e5m2", None),
    "F8_E4M3FNUZ": Element(1, "float8_e4m3fnuz", None),
    "F8_E5M2FNUZ": Element(1, "float8_e5m2fnuz", None),
    "I64": Element(8, "int64", "<i8"),
    "I32": Element(4, "int32", "<i4"),
    "I16": Element(2, "int16", "<i2"),
    "I8": Element(1, "int8", "|i1"),
    "U64": Element(8, "uint64", "<u8"),
    "U32": Element(4, "uint32", "<u4"),
    "U16": Element(2, "uint16", "<u2"),
    "U8": Element(1, "uint8", "|u1"),
    "BOOL": Element(1, "bool", "|b1"),
    "C64": Element(8, "complex64", "<c8"),
}
CODE_OF_TORCH = {element.torch: code for code, element in BY_CODE.items()}
CODE_OF_NUMPY = {element.numpy: code for code, element in BY_CODE.items() if element.numpy is not None}

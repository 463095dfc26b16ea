"""TensorBoard's event files, written by hand: TFRecord frames around small Event messages.

A frame is the length (8 bytes), its checksum, the message, its checksum; the checksum is CRC-32C, rotated and shifted
by a constant. An Event is a protobuf with wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7.
A rollback needs no rewriting: a session that starts at a step makes TensorBoard forget what came at or after it.
`results` appends what these return.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache, reduce
from operator import getitem, xor
from typing import Any

__all__ = ["crc32c", "scalars_event", "session_event", "version_event"]

_SCALARS = frozenset({int, float, bool})
_LARGEST = 3.4028234663852886e38
_pack_length = struct.Struct("<Q").pack
_pack_crc = struct.Struct("<I").pack
_pack_time = struct.Struct("<cd").pack


def version_event(at: float) -> bytes:
    """What every event file begins with."""
    return _frame(_pack_time(b"\x09", at) + b"\x1a" + _sized(b"brain.Event:2"))


def session_event(at: float, step: int) -> bytes:
    """A session starts here: TensorBoard drops values of `step` and later. The first of a run drops nothing."""
    return _frame(_pack_time(b"\x09", at) + b"\x10" + _varint(step) + b"\x3a\x02\x08\x01")


def scalars_event(at: float, step: int, flat: dict[str, Any]) -> bytes:
    """The numbers among the values, each under its key; b"" if there are none."""
    values = [value for value in flat.values() if type(value) in _SCALARS]
    if len(values) == len(flat):
        tags = tuple(flat)
    else:
        tags = tuple(key for key, value in flat.items() if type(value) in _SCALARS)
    if not tags:
        return b""
    number = _varint(step)
    template = _template(tags, len(number))
    try:
        return template.frame(at, number, values)
    except OverflowError:  # beyond what 32 bits hold
        return template.frame(at, number, [_clamp(value) for value in values])


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC, byte by byte."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class _Template:
    """A framed Event with these tags, but for its time, its step (a varint of `step_bytes`) and its values.

    A CRC is linear: flipping bits flips the same bits of the sum wherever else they stand. So the sum of the message
    with zeros in these places is taken once, and each byte there has a table of what it adds. That is a third of
    the work of a byte-wise sum, and the longer the tags, the less.
    """

    __slots__ = ("_base", "_head", "_pack", "_pack_varying", "_pieces", "_tables")

    def __init__(self, tags: Sequence[str], step_bytes: int) -> None:
        constant, shape = [], f"<cdc{step_bytes}s"
        for tag in tags:
            name = b"\x0a" + _sized(tag.encode())
            constant.append(b"\x0a" + _varint(len(name) + 5) + name + b"\x15")
        constant[0] = b"\x2a" + _varint(sum(map(len, constant)) + 4 * len(tags)) + constant[0]
        varying = [*range(1, 9), *range(10, 10 + step_bytes)]
        end = 10 + step_bytes
        for piece in constant:
            shape += f"{len(piece)}sf"
            end += len(piece) + 4
            varying += range(end - 4, end)
        self._pieces: list[Any] = [b"\x09", 0.0, b"\x10", bytes(step_bytes)]
        for piece in constant:
            self._pieces += [piece, 0.0]
        self._pack = struct.Struct(shape).pack
        self._pack_varying = struct.Struct(f"<d{step_bytes}s{len(tags)}f").pack
        self._head = _frame_head(end)
        self._base = crc32c(self._pack(*self._pieces))
        self._tables = _tables(end, varying)

    def frame(self, at: float, number: bytes, values: Sequence[float]) -> bytes:
        varying = self._pack_varying(at, number, *values)
        pieces = self._pieces
        pieces[1], pieces[3], pieces[5::2] = at, number, values
        crc = reduce(xor, map(getitem, self._tables, varying), self._base)
        masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        return b"%b%b%b" % (self._head, self._pack(*pieces), _pack_crc(masked))


_template = lru_cache(maxsize=16)(_Template)


def _tables(size_bytes: int, places: Sequence[int]) -> list[list[int]]:
    """For each place in a message of that size: what a byte there, by its value, adds to the CRC."""
    table, wanted = _table(), set(places)
    bits = [table[1 << bit] for bit in range(8)]
    found: dict[int, list[int]] = {}
    for place in reversed(range(size_bytes)):
        if place in wanted:
            row = [0]
            for bit in bits:
                row += [value ^ bit for value in row]
            found[place] = row
        bits = [(bit >> 8) ^ table[bit & 0xFF] for bit in bits]
    return [found[place] for place in places]


@cache
def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


def _frame(message: bytes) -> bytes:
    return _frame_head(len(message)) + message + _masked_crc(message)


def _frame_head(size_bytes: int) -> bytes:
    length = _pack_length(size_bytes)
    return length + _masked_crc(length)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return _pack_crc(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _clamp(value: float) -> float:
    if value != value or -_LARGEST <= value <= _LARGEST:
        return float(value)
    return float("inf") if value > 0 else float("-inf")


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(value: int) -> bytes:
    return bytes(_septets(value))


def _septets(value: int) -> Iterable[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value

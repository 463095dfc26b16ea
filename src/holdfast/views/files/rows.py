"""One row as a line of result.json and as a line of progress.csv.

Both run for every report of a run, thousands a second, so the usual case (a flat dict of finite numbers) goes through
msgspec at once. A line never holds a raw newline: counting lines is counting rows. `results` calls these.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import msgspec

from holdfast.core.curve import Row

__all__ = ["CsvTable", "json_line", "parse_line"]

_encode = msgspec.json.Encoder().encode
_FIXED = (
    "training_iteration",
    "timestamp",
    "date",
    "checkpoint_dir_name",
    "time_this_iter_s",
    "time_total_s",
)
_FIXED_NAMES = frozenset(_FIXED)
_NEEDS_QUOTES = frozenset(',"')


def json_line(row: Row, flat: dict[str, Any]) -> bytes:
    """The row as a line of result.json; a user's own `date` or the like wins over ours, save for the iteration."""
    body = row.metrics | _own(row)
    if not _FIXED_NAMES.isdisjoint(row.metrics):
        body |= {key: value for key, value in row.metrics.items() if key != "training_iteration"}
    if _all_finite(flat):
        return _encode(body) + b"\n"
    # msgspec writes null for NaN; what people and Ray's readers expect is what Python's json writes.
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


class CsvTable:
    """The columns of progress.csv: ours first, then the user's in the order in which they came up."""

    def __init__(self, columns: list[str] | None = None) -> None:
        self._user = columns[len(_FIXED) :] if columns else []
        self._known = set(self._user) | _FIXED_NAMES

    @property
    def columns(self) -> list[str]:
        return [*_FIXED, *self._user]

    def widen(self, flat: dict[str, Any]) -> int:
        """Take in keys not seen before; how many there were."""
        if self._known.issuperset(flat):
            return 0
        new = [key for key in flat if key not in self._known]
        self._user += new
        self._known.update(new)
        return len(new)

    def widened(self) -> Callable[[Iterator[bytes]], Iterator[bytes]]:
        """From the lines of a narrower table to those of this one: earlier rows have nothing in the new columns."""
        header, width = self.header(), len(self.columns)

        def change(lines: Iterator[bytes]) -> Iterator[bytes]:
            yield header
            missing = b"," * (width - len(parse_line(next(lines, header).decode()))) + b"\n"
            for line in lines:
                yield line[:-1] + missing

        return change

    def header(self) -> bytes:
        return ",".join(map(_cell, [*_FIXED, *self._user])).encode() + b"\n"

    def line(self, row: Row, flat: dict[str, Any]) -> bytes:
        if not _FIXED_NAMES.isdisjoint(flat):
            own = _own(row) | flat | {"training_iteration": row.iteration}
            return ",".join(_cell(own.get(key)) for key in chain(_FIXED, self._user)).encode() + b"\n"
        second = int(row.at)
        name = row.checkpoint and _cell(row.checkpoint)
        first = f"{row.iteration},{second},{_date(second)},{name or ''},"
        values = [row.this_s, row.total_s, *map(flat.get, self._user)]
        if _all_numbers(values):
            return b"%b%b\n" % (first.encode(), _encode(values)[1:-1])
        return f"{first}{','.join(map(_cell, values))}\n".encode()


def parse_line(line: str) -> list[str]:
    """The cells of one line of CSV."""
    return next(csv.reader([line]), [])


def _own(row: Row) -> dict[str, Any]:
    second = int(row.at)
    own = {
        "training_iteration": row.iteration,
        "timestamp": second,
        "date": _date(second),
        "time_this_iter_s": row.this_s,
        "time_total_s": row.total_s,
    }
    if row.checkpoint is not None:
        own["checkpoint_dir_name"] = row.checkpoint
    return own


_last_date = (0, "")


def _date(second: int) -> str:
    """Local time, once a second: formatting it costs as much as the rest of a row."""
    global _last_date
    if _last_date[0] != second:
        _last_date = (second, time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(second)))
    return _last_date[1]


def _all_finite(flat: dict[str, Any]) -> bool:
    for value in flat.values():
        kind = type(value)
        if (kind is float and value - value != 0.0) or kind is list:
            return False
    return True


def _all_numbers(values: list[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is float:
            if value - value != 0.0:
                return False
        elif kind is not int:
            return False
    return True


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float | int):
        return repr(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if "\n" in text or "\r" in text:
        text = " ".join(text.splitlines())
    return text if _NEEDS_QUOTES.isdisjoint(text) else '"' + text.replace('"', '""') + '"'

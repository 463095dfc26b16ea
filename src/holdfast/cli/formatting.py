"""How the command line says sizes, times, metrics and tables to people, and everything to programs (`--json`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from holdfast.core.json_floats import tag_floats
from holdfast.printable import printable

__all__ = [
    "count_text",
    "duration_text",
    "json_option",
    "metrics_text",
    "print_json",
    "print_line",
    "print_table",
    "size_text",
    "time_text",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size_bytes: float) -> str:
    """`812 B`, `1.5 GiB`: powers of 1024, three digits or so."""
    power = 0
    while round(size_bytes, 1) >= 1024 and power < len(_UNITS) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:.0f} B" if power == 0 else f"{size_bytes:.1f} {_UNITS[power]}"


def duration_text(seconds: float) -> str:
    """`0.4 s`, `75 s`, `12 min`, `3 h 5 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def time_text(created_at: str) -> str:
    """A manifest's UTC time, without its fractions: `2026-01-31 12:00:05Z`."""
    return f"{created_at[:10]} {created_at[11:19]}Z" if len(created_at) >= 19 else created_at


def count_text(count: int, what: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """`loss=0.25 epoch=3`, floats in four digits."""
    return " ".join(f"{name}={_value_text(value)}" for name, value in metrics.items())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Columns as wide as they must be; those in `right` end together."""
    rows = [[printable(text) for text in row] for row in rows]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        cells = [
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print_line("  ".join(cells).rstrip())


def print_line(text: str = "", *, err: bool = False) -> None:
    """One line; what a terminal might act upon is escaped. Commands print people's lines with this and nothing else."""
    click.echo(printable(text), err=err)


def print_json(shape: Mapping[str, Any]) -> None:
    """One JSON object on standard output. NaN and the infinities, which JSON lacks, are {"$float": "nan"}."""
    text = json.dumps(tag_floats(dict(shape)), indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(printable(text, lines=True))


def json_option(command: _F) -> _F:
    """The option that all commands share."""
    option: Callable[[_F], _F] = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    return option(command)


def _value_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""What the command line prints: lines and tables for people, one JSON object for programs (`--json`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from holdfast.core.json_floats import tag_floats
from holdfast.printable import printable

__all__ = [
    "json_option",
    "print_json",
    "print_line",
    "print_table",
]

_F = TypeVar("_F", bound=Callable[..., Any])


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

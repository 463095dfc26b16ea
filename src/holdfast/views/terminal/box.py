"""A titled box around two columns, in line-drawing characters where the stream can encode them. `layouts` fills it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

__all__ = ["box", "columns_of"]

_FINE = "╭─╮│├┤╰╯"
_PLAIN = "+-+|++++"


def box(title: str, rows: Sequence[tuple[str, str]], *, fine: bool = True, right: bool = False) -> str:
    """The box as lines of text, without a last newline. `right` aligns the values there, as numbers like it."""
    top_left, bar, top_right, side, left, right_side, low_left, low_right = tuple(_FINE if fine else _PLAIN)
    keys = max((columns_of(key) for key, _ in rows), default=0)
    values = max((columns_of(value) for _, value in rows), default=0)
    inner = max(keys + 3 + values if rows else 0, columns_of(title))
    values = inner - keys - 3
    lines = [
        f"{top_left}{bar * (inner + 2)}{top_right}",
        f"{side} {_pad(title, inner)} {side}",
        f"{left}{bar * (inner + 2)}{right_side}",
    ]
    for key, value in rows:
        padded = " " * (values - columns_of(value)) + value if right else _pad(value, values)
        lines.append(f"{side} {_pad(key, keys)}   {padded} {side}")
    return "\n".join([*lines, f"{low_left}{bar * (inner + 2)}{low_right}"])


def columns_of(text: str) -> int:
    """How many columns a terminal gives to this text."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)


def _pad(text: str, width: int) -> str:
    return text + " " * (width - columns_of(text))

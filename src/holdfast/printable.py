"""Text that others wrote, made safe to print: manifests, journals and file names may hold terminal escape sequences.

Everything that Holdfast prints passes here once, where it is printed: errors (`HoldfastError.__str__`), the command
line (`cli.output`) and the terminal view (`views.terminal`). What workers print is the user's own.
"""

from __future__ import annotations

__all__ = ["printable"]

_SPACES = {"\n": " ", "\r": " ", "\t": " "}
_LINES = {"\n": "\n", "\r": " ", "\t": "\t"}


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text on one line, with every character that a terminal may act upon as `\u001b`; `lines` keeps line feeds.

    That covers escapes, other control characters, what turns the direction of writing, and halves of surrogate pairs,
    which cannot be encoded. The form is JSON's, so that JSON stays JSON.
    """
    if text.isprintable():
        return text
    kept = _LINES if lines else _SPACES
    return "".join(char if char.isprintable() else kept.get(char) or _escaped(char) for char in text)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))

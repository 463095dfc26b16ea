"""Flatten a state: one walk over the nested structure gives its tokens, its plain values and its leaves.

The tokens are the structure and nothing else: two states with equal tokens have the same files at the same offsets, so
`plan` compares them with those of the last time and lays out anew only what changed. A walk therefore costs well under
a microsecond a value, and a path is put together only once something is refused. `skeleton` turns tokens into JSON and
back; `tensors` says what a leaf is. Pure: no framework is known here.
"""

from __future__ import annotations

import base64
import enum
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from holdfast.errors import ConfigError

__all__ = [
    "COUNTER",
    "DEPTH_MAX",
    "DICT",
    "LEAF",
    "LIST",
    "OBJECT",
    "PLAIN",
    "TUPLE",
    "Flat",
    "LeafAdapter",
    "NotSaveable",
    "flatten",
]

DEPTH_MAX = 64
"""The limit of nesting: far above real states, and low enough for JSON readers with a small stack."""

# What a token says. A container is followed by its length and its items; a dict's items are a key and a value each: a
# str key stands for itself, any other is the JSON of its form, as bytes. An object is a dict whose keys JSON can have.
# A leaf is followed by its description.
PLAIN = 0
LEAF = 1
LIST = 2
TUPLE = 3
OBJECT = 4
DICT = 5
COUNTER = 6

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1


class LeafAdapter(Protocol):
    """Recognises the arrays of a framework."""

    def leaf(self, value: Any) -> Any:
        """A description that is equal for leaves stored alike, or None for what is no leaf. May raise `NotSaveable`."""

    def tag(self, value: Any) -> dict[str, Any] | None:
        """The JSON form of a framework's own plain value, such as a dtype; None for anything else."""


@dataclass(slots=True)
class Flat:
    """A flattened state."""

    tokens: list[Any] = field(default_factory=list)
    plains: list[Any] = field(default_factory=list)
    """The plain values in their JSON form, in the order of the walk."""
    leaves: list[Any] = field(default_factory=list)


class NotSaveable(Exception):
    """Something in the state cannot be saved. The path is added as the exception passes up the walk."""

    def __init__(self, reason: str, error: type[Exception] = TypeError) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error
        self.steps: list[str] = []
        self.above: list[int] = []

    def came_through(self, container: Any, step: str) -> None:
        """Add `step`, the key or index within `container`, to the path."""
        self.steps.append(step)
        self.above.append(id(container))

    def spell_out(self) -> Exception:
        """The error for the user."""
        if self.error is RecursionError:
            if len(set(self.above)) < len(self.above):
                reason = "contains itself, so it has no end: take the loop out"
            else:
                reason = f"is nested deeper than {DEPTH_MAX} levels: flatten it"
            return ConfigError(f"{self._path(6)}...: the state {reason}.")
        return self.error(f"{self._path()}: {self.reason}.")

    def _path(self, most: int | None = None) -> str:
        path = "".join(self.steps[::-1][:most])
        return path.removeprefix(".") or "the state itself"


def flatten(value: Any, adapter: LeafAdapter) -> Flat:
    """Flatten `value`. What cannot be saved raises a `TypeError` (or `ConfigError`) that names its path."""
    flat = Flat()
    try:
        _walk(value, flat, adapter, 0)
    except NotSaveable as refused:
        raise refused.spell_out() from None
    return flat


def _walk(value: Any, flat: Flat, adapter: LeafAdapter, depth: int) -> None:
    kind = type(value)
    encode = _ENCODERS.get(kind)
    if encode is not None:
        flat.tokens.append(PLAIN)
        flat.plains.append(encode(value))
    elif kind is dict:
        _walk_dict(value, OBJECT, flat, adapter, depth)
    elif kind is list:
        _walk_sequence(value, LIST, flat, adapter, depth)
    elif kind is tuple:
        _walk_sequence(value, TUPLE, flat, adapter, depth)
    elif (described := adapter.leaf(value)) is not None:
        flat.tokens += (LEAF, described)
        flat.leaves.append(value)
    else:
        _walk_unusual(value, flat, adapter, depth)


def _walk_dict(value: dict[Any, Any], token: int, flat: Flat, adapter: LeafAdapter, depth: int) -> None:
    if depth >= DEPTH_MAX:
        raise NotSaveable("", RecursionError)
    tokens = flat.tokens
    begin = len(tokens)
    tokens += (token, len(value))
    key: Any = ""
    try:
        for key, item in value.items():
            if type(key) is str and key[:1] != "$":
                tokens.append(key if key.isascii() else _text(key))
            else:
                tokens.append(_key_token(key))
                if token == OBJECT:
                    tokens[begin] = DICT
            _walk(item, flat, adapter, depth + 1)
    except NotSaveable as refused:
        refused.came_through(value, f".{key}" if type(key) is str else f"[{key!r}]")
        raise


def _walk_sequence(value: Any, token: int, flat: Flat, adapter: LeafAdapter, depth: int) -> None:
    if depth >= DEPTH_MAX:
        raise NotSaveable("", RecursionError)
    flat.tokens += (token, len(value))
    at = 0
    try:
        for at, item in enumerate(value):  # noqa: B007  the handler needs it
            _walk(item, flat, adapter, depth + 1)
    except NotSaveable as refused:
        refused.came_through(value, f"[{at}]")
        raise


def _walk_unusual(value: Any, flat: Flat, adapter: LeafAdapter, depth: int) -> None:
    """Values of other types: subclasses of plain types, and the frameworks' own plain values."""
    tagged = adapter.tag(value)
    if tagged is not None:
        flat.tokens.append(PLAIN)
        flat.plains.append(tagged)
        return
    if isinstance(value, Counter):
        _walk_dict(value, COUNTER, flat, adapter, depth)
    elif isinstance(value, dict):
        _walk_dict(value, OBJECT, flat, adapter, depth)
    elif isinstance(value, list):
        _walk_sequence(value, LIST, flat, adapter, depth)
    else:
        base = next((base for base in _ENCODERS if isinstance(value, base) and base is not type(None)), None)
        if base is None or isinstance(value, enum.Enum):
            raise NotSaveable(
                f"{_name(type(value))} cannot be saved in a state: give tensors, numpy arrays, plain values, or "
                "lists, tuples and dicts of these"
            )
        flat.tokens.append(PLAIN)
        flat.plains.append(_ENCODERS[base](base(value)))


def _key_token(key: Any) -> str | bytes:
    if type(key) is str:
        return _text(key)
    return msgspec.json.encode(_key_form(key))


def _key_form(key: Any, depth: int = 0) -> Any:
    if depth > DEPTH_MAX:
        raise NotSaveable("a key is nested too deeply: use a flat one", ConfigError)
    encode = _ENCODERS.get(type(key))
    if encode is not None and type(key) is not bytes:
        return encode(key)
    if type(key) is tuple:
        return {"$tuple": [_key_form(item, depth + 1) for item in key]}
    raise NotSaveable(
        f"a key of type {_name(type(key))} cannot be saved: use str, int, float, bool, None, or tuples of these"
    )


def _int(value: int) -> Any:
    return value if _INT_MIN <= value <= _INT_MAX else {"$int": f"{value:x}"}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise NotSaveable(
                'a str with a lone surrogate is no text: clean it with .encode(errors="replace").decode()', ConfigError
            ) from None
    return value


def _bytes(value: bytes) -> Any:
    return {"$bytes": base64.b64encode(value).decode()}


def _as_is(value: Any) -> Any:
    return value


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    bool: _as_is,
    int: _int,
    float: _float,
    str: _text,
    bytes: _bytes,
    type(None): _as_is,
}

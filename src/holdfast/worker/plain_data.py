"""Plain data: what may go into a report, and clear words about what may not.

Numbers, strings, booleans, None, and lists and dicts of these; one-element tensors and numpy scalars become Python
numbers on the way. Checked in the worker, at the user's own line, so that nothing odd ever reaches the wire, the
journal or JSON. Used by `session`; knows no framework, only the shape of its scalars.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

__all__ = ["plain_data", "plain_metrics"]

_ALWAYS_PLAIN = frozenset({float, bool, NoneType})
_INT_MIN = -(2**63)
_INT_MAX = 2**64 - 1
_DEPTH_MAX = 32


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of one report as plain data. The argument itself where it is plain already: this runs in every
    step of a training loop."""
    if type(metrics) is dict:
        for key, value in metrics.items():
            kind = type(value)
            if type(key) is not str or not key.isascii():
                break
            if kind in _ALWAYS_PLAIN:
                continue
            if kind is int and _INT_MIN <= value <= _INT_MAX:
                continue
            if kind is str and value.isascii():
                continue
            break
        else:
            return metrics
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"train.report() takes its metrics as a dict with str keys, not {_name(metrics)}: "
            'write train.report({"loss": loss}).'
        )
    return _dict(metrics, "metrics", ())


def plain_data(value: Any, what: str) -> Any:
    """`value` as plain data; `what` names it in errors."""
    return _plain(value, what, ())


def _plain(value: Any, what: str, path: tuple[str, ...]) -> Any:
    kind = type(value)
    if kind in _ALWAYS_PLAIN:
        return value
    if len(path) > _DEPTH_MAX:
        raise ValueError(f"{_where(what, path[:3])}... is nested deeper than {_DEPTH_MAX} levels: flatten it.")
    if isinstance(value, bool | NoneType):
        return value
    if isinstance(value, int):
        return _int(int(value), what, path)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return _str(str(value), what, path)
    if isinstance(value, Mapping):
        return _dict(value, what, path)
    if isinstance(value, list | tuple):
        return [_plain(item, what, (*path, str(at))) for at, item in enumerate(value)]
    if callable(getattr(value, "item", None)):
        return _scalar(value, what, path)
    raise TypeError(
        f"{_where(what, path)} is {_name(value)}: use numbers, strings, booleans, None, or lists and dicts of these."
    )


def _dict(value: Mapping[Any, Any], what: str, path: tuple[str, ...]) -> dict[str, Any]:
    plain = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{_where(what, path)} has the key {key!r} of type {_name(key)}: keys must be str.")
        key = _str(str(key), what, (*path, repr(key)))
        plain[key] = _plain(item, what, (*path, key))
    return plain


def _scalar(value: Any, what: str, path: tuple[str, ...]) -> Any:
    """A numpy scalar, or a tensor or array of one element: anything with `item()` and a count of elements."""
    numel = getattr(value, "numel", None)
    count = numel() if callable(numel) else getattr(value, "size", 1)
    if count != 1:
        raise ValueError(
            f"{_where(what, path)} is {_name(value)} of {count} elements: only one-element ones can be reported, "
            "so reduce it (such as .mean()) or write .tolist()."
        )
    item = value.item()
    if isinstance(item, bool | int | float | str):
        return _plain(item, what, path)
    raise TypeError(
        f"{_where(what, path)} is {_name(value)} that holds {_name(item)}: convert it to a number or a string."
    )


def _int(value: int, what: str, path: tuple[str, ...]) -> int:
    if _INT_MIN <= value <= _INT_MAX:
        return value
    raise ValueError(f"{_where(what, path)} is an int beyond 64 bits: write it as float(...) or str(...).")


def _str(value: str, what: str, path: tuple[str, ...]) -> str:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{_where(what, path)} holds a lone surrogate, which is no text: clean it with "
            '.encode(errors="replace").decode().'
        ) from None
    return value


def _where(what: str, path: tuple[str, ...]) -> str:
    return f"{what}[{'/'.join(path)!r}]" if path else what


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

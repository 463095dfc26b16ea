"""The public surface of a module as text: names, parameters with their order and defaults, attributes of classes.

`compare` puts two such modules side by side and names each difference in one key, such as `train.report(validation)`.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

__all__ = ["Differences", "compare"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_REFUSED = "DEPRECATED"
"""Ray's default of a parameter that it refuses; any default of ours will do."""


@dataclass
class Differences:
    """Keys of what differs."""

    missing: list[str] = field(default_factory=list)
    """Ray has it, we do not."""
    ours: list[str] = field(default_factory=list)
    """We have it, Ray does not."""
    default: list[str] = field(default_factory=list)
    """Another default than Ray's."""
    order: list[str] = field(default_factory=list)
    """A call with positional arguments would mean something else."""


def compare(theirs: ModuleType, mine: ModuleType, name: str, only: tuple[str, ...] = ()) -> Differences:
    """What differs between Ray's module and ours, which is called `name` in keys. `only` these names of Ray's, for a
    module without `__all__`."""
    found = Differences()
    names = set(only or theirs.__all__)
    here = set(only or mine.__all__)
    found.missing += [f"{name}.{one}" for one in sorted(names) if not hasattr(mine, one)]
    found.ours += [f"{name}.{one}" for one in sorted(here - names)]
    for one in sorted(names):
        if hasattr(mine, one):
            _compare_objects(getattr(theirs, one), getattr(mine, one), f"{name}.{one}", found)
    return found


def _compare_objects(theirs: Any, mine: Any, key: str, found: Differences) -> None:
    if inspect.ismodule(theirs):
        return
    if inspect.isclass(theirs):
        if issubclass(theirs, enum.Enum):
            names = {one.name for one in theirs} | {one for one in vars(theirs) if not one.startswith("_")}
            found.missing += [f"{key}.{one}" for one in sorted(names) if not hasattr(mine, one)]
            return
        for name, attribute in sorted(_attributes(theirs)):
            if not hasattr(mine, name) and name not in getattr(mine, "__dataclass_fields__", ()):
                found.missing.append(f"{key}.{name}")
            elif callable(attribute) and not inspect.isclass(attribute):
                _compare_calls(attribute, getattr(mine, name), f"{key}.{name}", found)
        if issubclass(theirs, Exception) and theirs.__init__ is Exception.__init__:
            return
    if callable(theirs):
        _compare_calls(theirs, mine, key, found)
    elif theirs != mine:
        found.default.append(key)


def _attributes(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "ray":
            for name in vars(base):
                if not name.startswith("_"):
                    yield name, getattr(kind, name)


def _compare_calls(theirs: Any, mine: Any, key: str, found: Differences) -> None:
    try:
        there, here = inspect.signature(theirs).parameters, inspect.signature(mine).parameters
    except ValueError:  # made in C
        return
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in here.values())
    if any(one.kind in _VARIADIC for one in there.values()):
        return  # a wrapper: its parameters are not told
    for name, parameter in there.items():
        if name == "self":
            continue
        if name not in here:
            if not takes_all:
                found.missing.append(f"{key}({name})")
        elif not _same_default(parameter.default, here[name].default):
            found.default.append(f"{key}({name})")
    found.ours += [f"{key}({name})" for name, one in here.items() if name not in there and one.kind not in _VARIADIC]
    expected = [name for name, one in there.items() if one.kind in _POSITIONAL and name in here]
    given = [name for name, one in here.items() if one.kind in _POSITIONAL]
    if given[: len(expected)] != expected:
        found.order.append(key)


def _same_default(theirs: Any, mine: Any) -> bool:
    if theirs == _REFUSED:
        return True
    if isinstance(theirs, enum.Enum):
        return isinstance(mine, enum.Enum) and theirs.name == mine.name
    if repr(mine) == "<factory>":  # a dataclass makes the default that Ray puts in the place of None
        return theirs is None
    return bool(theirs == mine)

"""Schedulers and searchers by their short names, for scripts that take one from the command line."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from holdfast.errors import ConfigError

__all__ = ["create"]

_T = TypeVar("_T")


def create(parameter: str, value: str, classes: Mapping[str, str], base: type[_T], arguments: Mapping[str, Any]) -> _T:
    """An object of the class that `classes` has for the short name `value`, as `module:name`. `parameter` is where the
    user gave it, for the error."""
    found = classes.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        names = ", ".join(f'"{name}"' for name in classes)
        raise ConfigError(f"{parameter} must be one of {names}, not {value!r}.")
    module, _, name = found.partition(":")
    made = getattr(importlib.import_module(module), name)(**arguments)
    assert isinstance(made, base)
    return made

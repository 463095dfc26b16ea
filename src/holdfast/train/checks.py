"""The sentences that bad settings get: one per kind of mistake, naming the field and the way out.

`config` and `trainer` call these with the field's name as a user writes it, such as "RunConfig(name)".
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from holdfast.core.own_names import is_own_name
from holdfast.errors import ConfigError
from holdfast.train.callbacks import UserCallback

__all__ = [
    "address",
    "callbacks",
    "flag",
    "has_no_effect",
    "nested",
    "one_of",
    "output_files",
    "resources",
    "run_name",
    "runtime_environment",
    "seconds",
    "share",
    "storage_path",
    "warn_of_no_effect",
    "whole_number",
    "working_directory",
]

_NAME_BYTES_MAX = 200
_told: set[str] = set()
"""Fields that were warned of already."""
_C = TypeVar("_C")


def has_no_effect(config: Any, reasons: Mapping[str, str]) -> None:
    """Warn of each of these fields that is set to something else than its default, once a process. A subclass in which
    some have an effect names them in `_effective`."""
    effective = getattr(config, "_effective", ())
    reasons = {name: reason for name, reason in reasons.items() if name not in effective}
    for field in fields(config):
        default = field.default if field.default is not MISSING else None
        value = getattr(config, field.name)
        if field.name in reasons and value not in (default, None):
            warn_of_no_effect(f"{type(config).__name__}({field.name})", reasons[field.name], stacklevel=5)


def warn_of_no_effect(what: str, reason: str, *, stacklevel: int) -> None:
    """Warn of one setting, once a process."""
    if what not in _told:
        _told.add(what)
        warnings.warn(f"{what} has no effect: {reason}", stacklevel=stacklevel)


def whole_number(what: str, value: Any, *, least: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        tail = f" ({hint})" if hint else ""
        raise ConfigError(f"{what} must be a whole number of {least} or more{tail}, not {value!r}.")


def seconds(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isinf(value):
        raise ConfigError(f"{what} must be a number of seconds above 0, not {value!r}.")


def share(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{what} must be a share above 0 and up to 1, such as 0.02, not {value!r}.")


def flag(what: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{what} must be True or False, not {value!r}.")


def address(what: str, value: Any) -> None:
    """`HOST:PORT`, or None."""
    if value is None:
        return
    if not isinstance(value, str):
        raise ConfigError(f"{what} must be of the form HOST:PORT, not {value!r}.")
    from holdfast.wire.join_string import parse_address

    parse_address(value, what)


def one_of(what: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        words = ", ".join(f'"{one}"' for one in allowed)
        raise ConfigError(f"{what} must be one of {words}, not {value!r}.")


def output_files(what: str, value: Any) -> tuple[str, str] | None:
    """The names of the files for stdout and stderr; None if none are wanted."""
    if value is None or value is False:
        return None
    names = ("stdout", "stderr") if value is True else (value, value) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{what} must be True, a file name, or a pair of them for stdout and stderr, not {value!r}.")
    for name in names:
        parts = name.split("/")
        if not name or "\0" in name or {"", ".", ".."} & set(parts):
            raise ConfigError(f"{what} must name files below the run's directory, not {name!r}.")
        if is_own_name(parts[0]):
            raise ConfigError(f"{what}: {name!r} is a name of the run's own; choose another.")
    shorter, longer = sorted(names, key=len)
    if longer.startswith(f"{shorter}/"):
        raise ConfigError(f"{what}: {shorter!r} cannot be a file and the directory of {longer!r}; choose another.")
    return names[0], names[1]


def resources(what: str, value: Any) -> Mapping[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f'{what} must be a dict such as {{"CPU": 2}}, not {value!r}.')
    for name, amount in value.items():
        good = isinstance(amount, int | float) and not isinstance(amount, bool) and 0 <= amount < math.inf
        if not isinstance(name, str) or not good:
            raise ConfigError(f"{what} must map names to amounts of 0 or more; {name!r}: {amount!r} does not.")
    return value


def run_name(what: str, value: Any) -> None:
    """None is a name to be made up; anything else must do as one directory's name on every storage."""
    if value is None:
        return
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{what} must be a non-empty string, not {value!r}; leave it out to have one made up.")
    if "/" in value or "\\" in value:
        raise ConfigError(f"{what} must not hold a slash, but is {value!r}: put the directories into storage_path.")
    if value in (".", "..") or value != value.strip() or not value.isprintable():
        raise ConfigError(f"{what} must do as a directory's name, but is {value!r}: use letters, digits, - _ and dots.")
    if len(value.encode(errors="replace")) > _NAME_BYTES_MAX:
        raise ConfigError(f"{what} is longer than {_NAME_BYTES_MAX} bytes: shorten it.")


def storage_path(what: str, value: Any, filesystem: object | None) -> None:
    """The store itself judges the path: opening writes nothing. None is fine, unless a filesystem needs it."""
    if value is None:
        if filesystem is not None:
            raise ConfigError(f"{what} is needed with storage_filesystem: write the path on that filesystem.")
        return
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{what} must be a path or a URI, not {value!r}.")
    from holdfast.storage.locate import open_store

    open_store(value, filesystem).close()


def nested(field: str, value: Any, kind: type[_C]) -> _C:
    """A configuration inside `RunConfig`; None is its defaults."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ConfigError(f"RunConfig({field}) must be a {kind.__name__}, not {type(value).__name__}.")
    return value


def callbacks(
    what: str, value: Any, base: type = UserCallback, base_name: str = "holdfast.train.UserCallback"
) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, Sequence):
        raise ConfigError(f"{what} must be a list of {base.__name__} objects, not {value!r}.")
    for one in value:
        if not isinstance(one, base):
            raise ConfigError(f"{what} holds a {type(one).__name__}: derive it from {base_name} and pass an instance.")
    return list(value)


def working_directory(what: str, value: Any) -> tuple[str | None, tuple[str, ...]]:
    """The working directory of a Ray runtime environment, and what is left out of it."""
    if not isinstance(value, Mapping):
        return None, ()
    given, excludes = value.get("working_dir"), value.get("excludes") or ()
    if given is not None and not isinstance(given, str | os.PathLike):
        raise ConfigError(f'{what}["working_dir"] must be a directory, not {given!r}.')
    if isinstance(excludes, str) or not all(isinstance(one, str) for one in excludes):
        raise ConfigError(
            f'{what}["excludes"] must be a list of patterns such as ["*.bin", "data/"], not {excludes!r}.'
        )
    return None if given is None else os.fspath(given), tuple(excludes)


def runtime_environment(what: str, value: Any) -> dict[str, str]:
    """The variables of a Ray runtime environment."""
    if value is None:
        return {}
    working_directory(what, value)
    variables = value.get("env_vars", {}) if isinstance(value, Mapping) else None
    if not isinstance(variables, Mapping) or not all(
        isinstance(part, str) for pair in variables.items() for part in pair
    ):
        raise ConfigError(f'{what} must be a dict such as {{"env_vars": {{"NAME": "value"}}}}, not {value!r}.')
    return dict(variables)

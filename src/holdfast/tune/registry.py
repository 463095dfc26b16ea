"""`register_trainable`: trainables by name, for scripts that call `tune.run("name")`. They are known to this process
only."""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.trainable import check_trainable

__all__ = ["find_trainable", "register_trainable"]

_registered: dict[str, Any] = {}


def register_trainable(name: str, trainable: Any, warn: bool = True) -> None:
    """Let `tune.run` and `Tuner` find this trainable by a name."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"register_trainable(name) must be a non-empty string, not {name!r}.")
    check_trainable(trainable)
    _registered[name] = trainable


def find_trainable(trainable: Any) -> Any:
    """What was given, or what was registered under the name that was given."""
    if not isinstance(trainable, str):
        return trainable
    if trainable not in _registered:
        known = ", ".join(sorted(_registered)) or "nothing is"
        raise ConfigError(
            f"No trainable is registered as {trainable!r} (registered: {known}): give the function itself, or call "
            "tune.register_trainable first."
        )
    return _registered[trainable]

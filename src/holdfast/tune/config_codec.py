"""Trials' configurations as the journal has them, and back.

What JSON cannot hold, such as a class of the main script or a lambda, is written as its place among all such values of
the search space: whoever goes on with the experiment has given the same space.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import ConfigError
from holdfast.tune.serialization import SecretFilter, Unstored, from_json, to_json

__all__ = ["ConfigCodec", "ConfigTexts", "find_unstored"]


class ConfigCodec:
    """Of one search space. Constants that look like secrets are not written, and are the space's when read."""

    def __init__(self, space: Mapping[str, Any] | None = None, constants: Mapping[str, Any] | None = None) -> None:
        """`constants` is the space without what is searched."""
        self._constants = constants or {}
        self._values: list[Any] = []
        """Those of the space that JSON cannot hold, in the order in which they stand there."""
        to_json(space or {}, self._collect)
        self._secrets = SecretFilter(self._constants, self._number)

    def encode(self, config: Mapping[str, Any]) -> Any:
        return self._secrets.hide(to_json(config, self._number))

    def decode(self, stored: Any) -> dict[str, Any]:
        """A value that is not of the space, such as what a function made, is `Unstored`."""
        found = from_json(self._filled(stored, self._constants), "param_space")
        assert isinstance(found, dict)
        return found

    def _collect(self, value: Any) -> dict[str, Any]:
        self._values.append(value)
        return {}

    def _number(self, value: Any) -> dict[str, Any]:
        for number, known in enumerate(self._values):
            if known is value:
                return {"number": number}
        return {}

    def _filled(self, stored: Any, constants: Any) -> Any:
        """What could not be stored of a configuration is what the space has now."""
        if isinstance(stored, list):
            items = constants if isinstance(constants, list | tuple) and len(constants) == len(stored) else ()
            return [self._filled(item, items[at] if items else None) for at, item in enumerate(stored)]
        if not isinstance(stored, dict):
            return stored
        if stored.get("$tune") == "missing":
            number = stored.get("number")
            if number is not None and number < len(self._values):
                return self._values[number]
            return constants if constants is not None else Unstored(stored["what"])
        if stored.get("$tune") == "tuple":
            return {**stored, "items": self._filled(stored["items"], constants)}
        known = constants if isinstance(constants, Mapping) else {}
        return {key: self._filled(value, known.get(key)) for key, value in stored.items()}


class ConfigTexts(ConfigCodec):
    """For who knows no space, and only looks: what cannot be made here is read as a text."""

    def decode(self, stored: Any) -> dict[str, Any]:
        found = from_json(_described(stored), "param_space")
        assert isinstance(found, dict)
        return found


def _described(stored: Any) -> Any:
    if isinstance(stored, list):
        return [_described(item) for item in stored]
    if not isinstance(stored, dict):
        return stored
    if stored.get("$tune") == "missing":
        return stored["what"]
    if "name" in stored and "$tune" in stored:  # of what has to be imported
        try:
            return from_json(stored, "param_space")
        except ConfigError:
            return stored["name"]
    return {key: _described(item) for key, item in stored.items()}


def find_unstored(config: Any) -> Unstored | None:
    """The first value of a configuration of which only a description is left."""
    if isinstance(config, Unstored):
        return config
    items = config.values() if isinstance(config, Mapping) else config if isinstance(config, list | tuple) else ()
    return next((found for item in items if (found := find_unstored(item)) is not None), None)

"""Search spaces, searchers, schedulers and stoppers as JSON, and back: by name and arguments, never by pickle.

A `Component` remembers what it was constructed with. What JSON lacks is written as a dict with the key `$tune`. A
function is stored as `module:qualname` if that leads back to it. What cannot be stored (a lambda, a function of the
main script, any other object) becomes a note of what it was: `to_json` never fails, so that two spaces can always be
compared, and `from_json` asks for it in one sentence.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from holdfast.core.masking import masked
from holdfast.errors import ConfigError
from holdfast.tune.search import sample

__all__ = ["Component", "SecretFilter", "Stateful", "Unstored", "from_json", "is_stored_whole", "to_json"]

_TAG = "$tune"
_RETRY = "call Tuner(...) again with the same name and storage_path, where it is given, instead of Tuner.restore(...)"


class Component:
    """Base of what users construct and an experiment must construct again: keeps the arguments of the constructor."""

    _constructed_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._constructed_with = (args, kwargs)
        return made


class Stateful(Component):
    """A component that learns while the experiment goes on."""

    def get_state(self) -> dict[str, Any]:
        """What it has learned since it was constructed, in terms of JSON. Optional: without it, whatever happened is
        repeated to a new one, in the same order."""
        raise NotImplementedError

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse of `get_state`."""
        raise NotImplementedError

    def save(self, checkpoint_path: str) -> None:
        """Write the state to a file, as JSON."""
        Path(checkpoint_path).write_text(json.dumps(to_json(self.get_state())))

    def restore(self, checkpoint_path: str) -> None:
        """Read what `save` wrote."""
        self.set_state(from_json(json.loads(Path(checkpoint_path).read_text()), f"state of {type(self).__name__}"))


@dataclass(frozen=True, slots=True)
class Unstored:
    """Stands for a value that could not be stored, and of which only a description is left."""

    what: str

    def __str__(self) -> str:
        return self.what


Note = Callable[[Any], dict[str, Any]]
"""What is to be said besides of a value that cannot be stored."""


def _nothing(value: Any) -> dict[str, Any]:
    return {}


def to_json(value: Any, note: Note = _nothing) -> Any:
    """The value in terms of JSON; `from_json` is the inverse, but for classes that are derived from numbers and strings
    (numpy's, enumerations), of which the plain value is left. What `note` returns is added to the note of each value
    that cannot be stored."""
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case str() if _is_text(value):
            return str.__str__(value)
        case float():
            plain = float(value)
            return plain if math.isfinite(plain) else {_TAG: "float", "value": repr(plain)}
        case Mapping():
            if all(isinstance(key, str) and _is_text(key) for key in value) and _TAG not in value:
                return {str.__str__(key): to_json(item, note) for key, item in value.items()}
            items = [[to_json(key, note), to_json(item, note)] for key, item in value.items()]
            return {_TAG: "dict", "items": items}
        case list():
            return [to_json(item, note) for item in value]
        case tuple():
            return {_TAG: "tuple", "items": [to_json(item, note) for item in value]}
        case timedelta():
            return {_TAG: "timedelta", "seconds": value.total_seconds()}
        case sample.Domain():
            name, arguments = value.factory()
            return {_TAG: "domain", "name": name, "arguments": to_json(arguments, note)}
        case Component():
            return _component_to_json(value)
        case Unstored():
            return {_TAG: "missing", "what": value.what}
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a scalar of numpy
        item = value.item()
        if isinstance(item, bool | int | float | str):
            return to_json(item)
    if inspect.isroutine(value) or isinstance(value, type):
        where = _importable_name(value)
        if where is not None and _may_be_named(where, value):
            return {_TAG: "function", "name": where}
        return {_TAG: "missing", "what": f"the function {getattr(value, '__qualname__', value)}", **note(value)}
    what = f"an object of {type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, str):
        what = "a string that is no Unicode text"
    return {_TAG: "missing", "what": what, **note(value)}


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: a path may have lone surrogates, for bytes that are no characters."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def from_json(value: Any, what: str, way_out: str = _RETRY) -> Any:
    """The value that `to_json` was given. `what` is its name for the user, such as "param_space", and `way_out` what
    they can do if something in it could not be stored."""
    if isinstance(value, list):
        return [from_json(item, what, way_out) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: from_json(item, what, way_out) for key, item in value.items()}
    if kind == "missing":
        raise ConfigError(f"The {what} of this experiment holds {value['what']}, which cannot be stored: {way_out}.")
    if kind == "float":
        return float(value["value"])
    if kind == "timedelta":
        return timedelta(seconds=value["seconds"])
    if kind == "function":
        return _import_function(value["name"], what, way_out)
    items = [from_json(item, what, way_out) for item in value.get("items", ())]
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return dict(items)
    keywords = {key: from_json(item, what, way_out) for key, item in value.get("keywords", {}).items()}
    if kind == "component":
        found = _import(value["name"], what, way_out)
        if not (isinstance(found, type) and issubclass(found, Component)):
            raise ConfigError(
                f"{value['name']}, named by the {what} of this experiment, is no searcher, scheduler, "
                f"stopper or callback: {way_out}."
            )
        return found(*items, **keywords)
    if kind == "domain" and value["name"] in sample.FACTORIES:
        arguments = {key: from_json(item, what, way_out) for key, item in value["arguments"].items()}
        return sample.FACTORIES[value["name"]](**arguments)
    raise ConfigError(f"The {what} of this experiment was written by another version of Holdfast ({kind}): {way_out}.")


class SecretFilter:
    """Leaves out of what is stored the constants that look like secrets, or have one in them: they are what the space
    has there when the experiment goes on, as other values that cannot be stored."""

    def __init__(self, constants: Any, note: Note = _nothing) -> None:
        """`note` is the one with which `to_json` makes the forms that `hide` is given."""
        self._constants = to_json(constants, note)
        self._masked = masked("", self._constants)

    def hide(self, form: Any) -> Any:
        """`form` is what `to_json` made of a space or configuration with these constants in it."""
        return _hide(form, self._constants, self._masked)


def _hide(form: Any, constants: Any, hidden: Any) -> Any:
    """`hidden` are the constants with their secrets masked."""
    if hidden == constants:
        return form
    tag = constants.get(_TAG) if isinstance(constants, dict) else None
    if tag == "missing":
        return form  # a description
    if form == constants and (tag is not None or not isinstance(form, dict | list)):
        return {_TAG: "missing", "what": "a secret"}
    if isinstance(form, dict) and isinstance(constants, dict) and form.get(_TAG) == tag:
        return {
            key: _hide(item, constants[key], hidden[key]) if key in constants and key != _TAG else item
            for key, item in form.items()
        }
    if isinstance(form, list) and isinstance(constants, list) and len(form) == len(constants):
        return [_hide(*one) for one in zip(form, constants, hidden, strict=True)]
    return form  # no constant, and not above one


def is_stored_whole(value: Any) -> bool:
    """Whether `from_json` can make from `to_json(value)` what it was."""
    return _is_whole(to_json(value))


def _is_whole(form: Any) -> bool:
    if isinstance(form, list):
        return all(map(_is_whole, form))
    if isinstance(form, dict):
        return form.get(_TAG) != "missing" and all(map(_is_whole, form.values()))
    return True


def _component_to_json(component: Component) -> Any:
    name = _importable_name(type(component))
    if name is None:
        return {_TAG: "missing", "what": f"the class {type(component).__qualname__}"}
    args, kwargs = component._constructed_with
    return {
        _TAG: "component",
        "name": name,
        "items": [to_json(one) for one in args],
        "keywords": {key: to_json(one) for key, one in kwargs.items()},
    }


def _importable_name(value: Any) -> str | None:
    """`module:qualname` if another process finds the same thing there."""
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not qualname or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return f"{module}:{qualname}" if found is value else None


def _import(name: str, what: str, way_out: str) -> Any:
    module, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The {what} of this experiment needs {name}, which cannot be imported ({error}): {way_out}."
        ) from error
    return found


def _import_function(name: str, what: str, way_out: str) -> Any:
    if _is_of_python(name):
        raise ConfigError(f"The {what} of this experiment names {name}, which is no function of a project: {way_out}.")
    found = _import(name, what, way_out)
    if not _may_be_named(name, found):
        raise ConfigError(f"The {what} of this experiment names {name}, which is no function: {way_out}.")
    return found


def _may_be_named(name: str, found: Any) -> bool:
    """Only functions and classes of projects: storage must not be able to name `os.system`."""
    return not _is_of_python(name) and (inspect.isfunction(found) or isinstance(found, type))


def _is_of_python(name: str) -> bool:
    return name.partition(":")[0].partition(".")[0] in sys.stdlib_module_names

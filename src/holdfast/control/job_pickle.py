"""Pickling the job for the workers, within a limit; and naming what is too large, where it is.

A function drags along what it captures: variables of the functions around it, globals of its script, default values.
Its configuration is pickled apart, so that runs that differ in nothing else share a zygote; a large one goes with the
function, for a zygote opens that once for all workers. `setup` calls this before anything is started.
"""

from __future__ import annotations

import functools
import inspect
import io
import linecache
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import cloudpickle

from holdfast.errors import ConfigError
from holdfast.linux.memory import available_bytes
from holdfast.worker.job import Job

__all__ = ["PickledJob", "function_limit_bytes", "pickle_config", "pickle_job"]

_LIMIT_VARIABLE = "HOLDFAST_FUNCTION_LIMIT_BYTES"
_MEMORY_SHARE = 4
"""Of the memory that is free: the driver holds the pickle, the agent a copy, and the zygote the object itself."""

_CONFIG_LIMIT_BYTES = 1024 * 1024
"""A larger configuration goes with the function."""


@dataclass(frozen=True, slots=True)
class PickledJob:
    """A job as workers will get it."""

    function: bytes
    config: bytes | None
    """None: it is in the function, or there is none."""
    config_modules: list[str]
    """What opening the configuration imports."""


class _TooLarge(Exception):
    pass


class _LimitedBuffer(io.BytesIO):
    """A file to pickle into, up to a limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def write(self, block: Any) -> int:
        if self.tell() + memoryview(block).nbytes > self._limit_bytes:
            raise _TooLarge
        return super().write(block)


class _Counter:
    """A file to pickle into: counts only."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def write(self, block: Any) -> None:
        self.size_bytes += memoryview(block).nbytes


def function_limit_bytes() -> int:
    """How large the pickled job may be: what the user says, or a quarter of the memory that is free."""
    text = os.environ.get(_LIMIT_VARIABLE)
    if text is None:
        return available_bytes() // _MEMORY_SHARE
    if not text.isdecimal():
        raise ConfigError(f"{_LIMIT_VARIABLE} must be a whole number of bytes, not {text!r}.")
    return int(text)


_CachedFunction = type(functools.cache(len))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends cached functions of the script (`functools.cache`) as it sends its other functions: by value, and empty.
    cloudpickle would send their names, which workers do not find."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is _CachedFunction and _is_of_script(value):
            how = value.cache_parameters()
            info = type(value.cache_info())
            return _CachedFunction, (value.__wrapped__, how["maxsize"], how["typed"], info), vars(value)
        return super().reducer_override(value)


def _is_of_script(function: Any) -> bool:
    """Whether workers cannot import it."""
    is_imported = function.__module__ in sys.modules and function.__module__ != "__main__"
    return not is_imported or "<locals>" in function.__qualname__


class _ConfigPickler(_Pickler):
    """Notes the modules of what it pickles."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        owner = value if isinstance(value, type | FunctionType) else type(value)
        self.modules.add(str(owner.__module__))
        return super().reducer_override(value)


def pickle_job(job: Job, what: str = "train_loop_per_worker or train_loop_config") -> PickledJob:
    """The job as workers will get it; `ConfigError` where it cannot be pickled or is too large. `what` is its name for
    the user."""
    limit_bytes = function_limit_bytes()
    try:
        config, modules = _pickle_config(job, min(limit_bytes, _CONFIG_LIMIT_BYTES))
        alone = job if config is None else replace(job, config=None)
        function = _dump(alone, limit_bytes)
        if sources := _sources(function + (config or b"")):
            function = _dump(replace(alone, sources=sources), limit_bytes)
    except _TooLarge:
        raise ConfigError(_describe_excess(job)) from None
    except (TypeError, AttributeError, ValueError, pickle.PicklingError, RecursionError) as error:
        raise ConfigError(
            f"{what} cannot be sent to the workers ({error}): "
            "open files, locks, connections and the like inside the function instead."
        ) from error
    return PickledJob(function, config, modules)


def pickle_config(config: dict[str, Any], what: str) -> tuple[bytes, list[str]]:
    """A configuration alone, for a function that was pickled before, and the modules that opening it imports. `what` is
    its name for the user."""
    try:
        pickled, modules = _pickle_config(Job(function=_nothing, config=config, takes_config=True, framework=None))
    except (TypeError, AttributeError, ValueError, pickle.PicklingError, RecursionError) as error:
        raise ConfigError(
            f"{what} cannot be sent to the workers ({error}): open files, locks, connections and the like inside the "
            "function instead."
        ) from error
    if pickled is None:
        raise ConfigError(
            f"A configuration drawn from {what} has more than {_size(_CONFIG_LIMIT_BYTES)}: give large objects to the "
            "function with tune.with_parameters."
        )
    return pickled, modules


def _nothing() -> None:
    """In the place of a function."""


def _dump(job: Job, limit_bytes: int) -> bytes:
    buffer = _LimitedBuffer(limit_bytes)
    _Pickler(buffer).dump(job)
    return buffer.getvalue()


def _pickle_config(job: Job, limit_bytes: int = _CONFIG_LIMIT_BYTES) -> tuple[bytes | None, list[str]]:
    """The configuration, and the modules that opening it imports; None where it is large, or there is none."""
    if job.config is None:
        return None, []
    buffer = _LimitedBuffer(limit_bytes)
    pickler = _ConfigPickler(buffer)
    try:
        pickler.dump(job.config)
    except _TooLarge:
        return None, []
    modules = pickler.modules - {"builtins", "__main__"}
    return buffer.getvalue(), sorted(name for name in modules if name in sys.modules)


def _sources(pickled: bytes) -> dict[str, str]:
    """Source code that was never in a file (IPython enters its cells without a time), of the code that is sent."""
    return {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[1] is None and name.encode(errors="replace") in pickled
    }


def _describe_excess(job: Job) -> str:
    limit = f"the {_size(function_limit_bytes())} that may be sent to workers ({_LIMIT_VARIABLE})"
    found = [(_pickled_bytes(value), where, value) for where, value in _captured(job)]
    if not found:
        return f"train_loop_per_worker is larger than {limit}: load large objects inside the function instead."
    size_bytes, where, value = max(found, key=lambda one: one[0])
    kind = type(value)
    return (
        f"train_loop_per_worker with what it captures is larger than {limit}; the largest object is {where}, "
        f"{kind.__module__}.{kind.__qualname__} of {_size(size_bytes)}: load it inside the function instead."
    )


def _captured(job: Job) -> Iterator[tuple[str, Any]]:
    """Everything that travels with the job, with a name for it that the user knows."""
    for key, value in (job.config or {}).items():
        yield f"train_loop_config[{key!r}]", value
    pending: list[Any] = [job.function]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        if isinstance(function, functools.partial):
            pending.append(function.func)
            for number, value in enumerate(function.args):
                yield f"argument {number} of the functools.partial", value
            for name, value in function.keywords.items():
                yield f"the argument {name!r} of the functools.partial", value
        elif isinstance(function, MethodType):
            pending.append(function.__func__)
            yield "the object that the method is bound to", function.__self__
        elif isinstance(function, FunctionType):
            for where, value in _variables(function):
                if isinstance(value, FunctionType | functools.partial | MethodType):
                    pending.append(value)
                elif not inspect.ismodule(value):
                    yield where, value


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    found = inspect.getclosurevars(function)
    for name, value in found.nonlocals.items():
        yield f"the captured variable {name!r} of {function.__qualname__}", value
    for name, value in found.globals.items():
        yield f"the global variable {name!r}", value
    for value in [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]:
        yield f"a default value of {function.__qualname__}", value


def _pickled_bytes(value: Any) -> int:
    """The size of one object; 0 where it cannot be pickled on its own."""
    counter = _Counter()
    try:
        cloudpickle.dump(value, counter, protocol=pickle.HIGHEST_PROTOCOL)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError, RecursionError):
        return 0
    return counter.size_bytes


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"

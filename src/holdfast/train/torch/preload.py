"""What the zygote imports for a training function before it forks the first worker.

Setting up the process group needs torch alone, and the first worker should start soon. What is used later the zygote
learns from the first workers, with two exceptions. The first optimizer of a process imports `torch._dynamo`: half a
second of CPU and 70 MB in each worker, so where there are several the zygote does it once for all of them. The imports
of the compiler take many seconds, and a worker that dies early has taught the zygote nothing yet. Whether a function
uses them is read from the byte code of all that it reaches in the user's modules; for the compiler, of all else in its
module, too, where a wrong guess costs more.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

from holdfast.train.code_fingerprint import is_own_module

__all__ = ["preload_for"]

_GROUP = ("torch", "torch.distributed")
_OPTIMIZER = ("torch._dynamo",)
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
_FUNCTIONS_MAX = 2_000
_TABLE_MAX = 100
"""Larger tables of a module are data."""


def preload_for(function: Callable[..., Any], workers: int) -> tuple[str, ...]:
    """The modules to import for this training function, which is to run in so many workers."""
    try:
        return (*_GROUP, *_guess(function, workers))
    except Exception:  # noqa: BLE001  whatever an object of the user's raises when it is looked at: this is only a guess
        return _GROUP


def _guess(function: Callable[..., Any], workers: int) -> tuple[str, ...]:
    if any(_names(code, space, "compile") for code, space in _codes(function, whole_modules=True)):
        return _COMPILER
    if workers > 1 and any(_uses_optimizer(code, space) for code, space in _codes(function, whole_modules=False)):
        return _OPTIMIZER
    return ()


# ---------------------------------------------------------------------- which functions


def _codes(target: Any, *, whole_modules: bool) -> Iterator[tuple[types.CodeType, Mapping[str, Any]]]:
    """The code of all that the function reaches in the user's modules, with its globals; `whole_modules`: and of all
    else in its own module."""
    queue = list(_functions(target))
    if whole_modules:
        queue += [one for wrapped in queue for one in _defined_in(wrapped.__globals__)]
    seen: set[int] = set()
    while queue and len(seen) < _FUNCTIONS_MAX:
        function = queue.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for code in _nested(function.__code__):
            yield code, function.__globals__
            queue += _named_functions(code.co_names, function.__globals__)


def _functions(target: Any) -> Iterator[types.FunctionType]:
    """The function, and those that it wraps as a decorator or a partial, or has in its closure."""
    queue = [target]
    seen: set[int] = set()
    while queue:
        found = queue.pop()
        while isinstance(found, functools.partial):
            found = found.func
        if not isinstance(found, types.FunctionType) or id(found) in seen:
            continue
        seen.add(id(found))  # functions in closures may call each other
        yield found
        for cell in found.__closure__ or ():
            with suppress(ValueError):  # a variable that has no value yet
                queue.append(cell.cell_contents)


def _defined_in(space: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    """The functions and methods that are defined in the module with these globals."""
    for value in list(space.values()):
        for member in _members(value):
            if member.__module__ == space.get("__name__"):
                yield member


def _named_functions(names: tuple[str, ...], space: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    """What these names mean in the user's modules: functions, classes, objects of such classes, and tables of them."""
    values = [space[name] for name in names if name in space]
    modules: set[int] = set()
    while values:
        value = values.pop()
        if isinstance(value, types.ModuleType):
            if id(value) not in modules and is_own_module(value.__name__):
                modules.add(id(value))  # modules often import each other
                values += [vars(value)[one] for one in names if one in vars(value)]
        elif isinstance(value, dict | list | tuple | set):
            if len(value) <= _TABLE_MAX:
                entries = value.values() if isinstance(value, dict) else value
                values += [entry for entry in entries if not isinstance(entry, dict | list | tuple | set)]
        else:
            wrapped = list(_functions(value))
            yield from (one for one in wrapped or _members(value) if is_own_module(one.__module__))


def _members(value: Any) -> Iterator[types.FunctionType]:
    """A function itself; the methods of a class, or of an object's class, those that it inherits included."""
    if isinstance(value, types.FunctionType):
        yield value
        return
    for kind in _mro(value) or type(value).__mro__:
        if is_own_module(kind.__module__):
            for member in list(vars(kind).values()):
                if isinstance(member, staticmethod | classmethod):
                    member = member.__func__
                elif isinstance(member, property):
                    member = member.fget
                if isinstance(member, types.FunctionType):
                    yield member


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


# ---------------------------------------------------------------------- what they use


def _names(code: types.CodeType, space: Mapping[str, Any], attribute: str) -> bool:
    """Whether there is `torch.attribute` or `from torch import attribute`."""
    if attribute not in code.co_names:
        return False
    torch = [name for name in ("torch", *code.co_names) if name == "torch" or _module_name(space.get(name)) == "torch"]
    used = [one.argval for one in dis.get_instructions(code) if one.opname.startswith(("LOAD_", "IMPORT_"))]
    return any(first in torch and second == attribute for first, second in pairwise(used))


def _uses_optimizer(code: types.CodeType, space: Mapping[str, Any]) -> bool:
    """Whether there is anything of `torch.optim`, by whatever name, or a class that is derived from one there."""
    return _names(code, space, "optim") or any(
        _is_of_optim(name)
        or _is_of_optim(_module_name(value))
        or any(_is_of_optim(one.__module__) for one in _mro(value))
        for name, value in ((name, space.get(name)) for name in code.co_names)
    )


def _is_of_optim(module: str) -> bool:
    return module == "torch.optim" or module.startswith("torch.optim.")


def _module_name(value: Any) -> str:
    return value.__name__ if isinstance(value, types.ModuleType) else ""


def _mro(value: Any) -> tuple[type, ...]:
    return value.__mro__ if isinstance(value, type) else ()

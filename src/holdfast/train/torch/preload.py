"""What the zygote imports for a training function before it forks the first worker.

Setting up the process group needs torch alone, and the first worker should start soon. What is used later the zygote
learns from the first workers, with two exceptions. The first optimizer of a process imports `torch._dynamo`: a second
of CPU and 70 MB in each worker, so where there are several the zygote does it once for all of them, and their first
step comes sooner. The imports of the compiler take many seconds, and a worker that dies early has taught the zygote
nothing yet. Whether a function uses them is read from the byte code of all that it reaches in the user's modules.
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


def preload_for(function: Callable[..., Any], workers: int) -> tuple[str, ...]:
    """The modules to import for this training function, which is to run in so many workers."""
    reached = [(code, one.__globals__) for one in _reached(function) for code in _nested(one.__code__)]
    if any(_names(code, space, "compile") for code, space in reached):
        return (*_GROUP, *_COMPILER)
    if workers > 1 and any(_uses_optimizer(code, space) for code, space in reached):
        return (*_GROUP, *_OPTIMIZER)
    return _GROUP


# ---------------------------------------------------------------------- which functions


def _reached(target: Any) -> Iterator[types.FunctionType]:
    """The function, what it wraps, all else in its module, and what these name of other modules of the user's."""
    queue = [one for wrapped in _functions(target) for one in (wrapped, *_defined_in(wrapped.__globals__))]
    seen: set[int] = set()
    while queue and len(seen) < _FUNCTIONS_MAX:
        function = queue.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        for code in _nested(function.__code__):
            queue += _named_functions(code.co_names, function.__globals__)


def _functions(target: Any) -> Iterator[types.FunctionType]:
    """The function, and those that it wraps as a decorator or a partial."""
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, types.FunctionType):
        yield target
        for cell in target.__closure__ or ():
            with suppress(ValueError):  # a variable that has no value yet
                if cell.cell_contents is not target:
                    yield from _functions(cell.cell_contents)


def _defined_in(space: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    """The functions and methods that are defined in the module with these globals."""
    for value in list(space.values()):
        for member in _members(value):
            if member.__module__ == space.get("__name__"):
                yield member


def _named_functions(names: tuple[str, ...], space: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    for name in names:
        value = space.get(name)
        if isinstance(value, types.ModuleType) and is_own_module(value.__name__):
            values = [vars(value)[one] for one in names if one in vars(value)]
        else:
            values = [value]
        yield from (member for one in values for member in _members(one) if is_own_module(member.__module__))


def _members(value: Any) -> Iterator[types.FunctionType]:
    """A function itself, the methods of a class."""
    for member in list(vars(value).values()) if isinstance(value, type) else [value]:
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

"""What the zygote imports for a training function before it forks the first worker.

Only what setting up the process group needs, since the first worker should start soon: what a first step imports
besides (`torch._dynamo`: a second of CPU) the zygote learns from the first workers. The compiler is the exception. Its
imports take many seconds, in every worker, and a worker that dies early has taught the zygote nothing yet.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

__all__ = ["preload_for"]

_GROUP = ("torch", "torch.distributed")
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")


def preload_for(function: Callable[..., Any]) -> tuple[str, ...]:
    """The modules to import for this training function: the compiler's as well if its module calls `torch.compile`."""
    codes = (code for one in _functions(function) for beside in _beside(one) for code in _nested(beside.__code__))
    return (*_GROUP, *_COMPILER) if any(map(_calls_compile, codes)) else _GROUP


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


def _beside(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The function, and the functions and methods that are defined in its module."""
    yield function
    for value in list(function.__globals__.values()):
        for member in list(vars(value).values()) if isinstance(value, type) else [value]:
            if isinstance(member, types.FunctionType) and member.__module__ == function.__module__:
                yield member


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _calls_compile(code: types.CodeType) -> bool:
    if "compile" not in code.co_names:
        return False
    names = [one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD_")]
    return ("torch", "compile") in pairwise(names)

"""Which modules the zygote imports for a training function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.train.torch.preload import preload_for

torch: Any = None  # only the name counts: the functions below are never called


def _compiles(config: dict[str, Any]) -> None:
    torch.compile(config["model"])


def _compiles_within(config: dict[str, Any]) -> None:
    def step() -> Any:
        return torch.compile(config["model"], mode="default")

    step()


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(config: dict[str, Any]) -> Any:
        return function(config)

    return call


def _in_module(source: str) -> Any:
    names: dict[str, Any] = {"__name__": "script"}
    exec(source, names)
    return names["train_func"]


@pytest.mark.parametrize(
    "function",
    [
        _compiles,
        _compiles_within,
        functools.partial(_compiles, {}),
        _in_module("def make(model):\n    return torch.compile(model)\n\ndef train_func():\n    make(1)"),
        _in_module("class Job:\n    def run(self):\n        torch.compile(self)\n\ndef train_func():\n    Job().run()"),
        _decorated(_in_module("def train_func(config):\n    torch.compile(config)")),
    ],
)
def test_the_compiler_is_imported_for_a_module_that_calls_it(function: Callable[..., Any]) -> None:
    assert preload_for(function) == ("torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx")


@pytest.mark.parametrize(
    "function",
    [
        _in_module("import re\n\ndef train_func():\n    torch.manual_seed(0)\n    re.compile('x')"),
        _in_module("def train_func():\n    compile('1', '', 'eval')\n    torch.rand(1)"),
        len,
    ],
)
def test_the_compiler_is_not_imported_for_others(function: Callable[..., Any]) -> None:
    assert preload_for(function) == ("torch", "torch.distributed")

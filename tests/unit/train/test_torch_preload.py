"""Which modules the zygote imports for a training function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.train.torch.preload import preload_for

_GROUP = ("torch", "torch.distributed")
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
    assert preload_for(function, 1) == (*_GROUP, "torch._dynamo", "torch._inductor.compile_fx")


@pytest.mark.parametrize(
    "function",
    [
        _in_module("import re\n\ndef train_func():\n    torch.manual_seed(0)\n    re.compile('x')"),
        _in_module("def train_func():\n    compile('1', '', 'eval')\n    torch.rand(1)"),
        len,
    ],
)
def test_the_compiler_is_not_imported_for_others(function: Callable[..., Any]) -> None:
    assert preload_for(function, 2) == _GROUP


_OPTIMIZERS = [
    "import torch\n\ndef train_func():\n    torch.optim.SGD([])",
    "import torch as t\n\ndef train_func():\n    step = lambda: t.optim.SGD([])",
    "def train_func():\n    import torch\n    torch.optim.SGD([])",
    "def train_func():\n    from torch import optim\n    optim.SGD([])",
    "def train_func():\n    from torch.optim import SGD\n    SGD([])",
    "from torch import optim\n\ndef train_func():\n    optim.SGD([])",
    "from torch.optim import SGD as Method\n\ndef train_func():\n    Method([])",
    "from torch.optim import SGD\n\nclass Job:\n    def run(self):\n        SGD([])\n\ndef train_func():\n    Job()",
    "from torch.optim import SGD\n\nclass Own(SGD):\n    pass\n\ndef train_func():\n    Own([])",
    "from helpers_of_this_test import train_func",
    "import torch\n\ndef make():\n    torch.optim.SGD([])\n\nmakers = {'sgd': make}\n\n"
    "def train_func():\n    makers['sgd']()",
    "import torch\n\nclass Job:\n    @classmethod\n    def run(cls):\n        torch.optim.SGD([])\n\n"
    "class Own(Job):\n    pass\n\njob = Own()\n\ndef train_func():\n    job.run()",
    "import functools, torch\n\ndef make(kind):\n    torch.optim.SGD([])\n\nsgd = functools.partial(make, 1)\n\n"
    "def train_func():\n    sgd()",
    "import helpers_of_this_test as helpers\n\ndef train_func():\n    helpers.train_func()",
]


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the user's, next to the script."""
    source = "import torch\n\ndef train_func():\n    _step()\n\ndef _step():\n    torch.optim.SGD([])\n"
    (tmp_path / "helpers_of_this_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("helpers_of_this_test", None)


@pytest.mark.parametrize("source", _OPTIMIZERS)
def test_what_the_first_optimizer_imports_is_imported_once_for_several_workers(source: str, helpers: None) -> None:
    assert preload_for(_in_module(source), 2) == (*_GROUP, "torch._dynamo")
    assert preload_for(_in_module(source), 1) == _GROUP


@pytest.mark.parametrize(
    "source",
    [
        "import torch\n\ndef train_func():\n    torch.rand(1)",
        "import torch\n\ndef train_func(trainer):\n    trainer.optim(torch)",
        "import torch, helpers_of_this_test as helpers\n\ndef train_func():\n    helpers.other(torch)",
        "import torch\n\ndef other():\n    torch.optim.SGD([])\n\ndef train_func():\n    torch.rand(1)",
    ],
)
def test_a_function_without_an_optimizer_starts_at_once(source: str, helpers: None) -> None:
    assert preload_for(_in_module(source), 8) == _GROUP


def test_modules_that_import_each_other_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch, {other}\n\ndef build():\n    torch.optim.SGD([])\n"
    (tmp_path / "first_of_this_test.py").write_text(source.format(other="second_of_this_test"))
    (tmp_path / "second_of_this_test.py").write_text(source.format(other="first_of_this_test"))
    monkeypatch.syspath_prepend(tmp_path)
    names = "first_of_this_test", "second_of_this_test"
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        calls = "\n    ".join(f"{name}.build()" for name in names)
        function = _in_module(f"import {', '.join(names)}\n\ndef train_func():\n    {calls}")
        assert preload_for(function, 2) == (*_GROUP, "torch._dynamo")
    finally:
        for name in names:
            sys.modules.pop(name, None)


def test_functions_in_closures_may_call_each_other() -> None:
    even = "    def even(number):\n        return number == 0 or odd(number - 1)\n"
    odd = "    def odd(number):\n        return number != 0 and even(number - 1)\n"
    function = _in_module(f"def make():\n{even}{odd}    return even\n\ntrain_func = make()")
    assert preload_for(function, 2) == _GROUP


class _Proxy:
    """As lazy objects of frameworks are: what it stands for is not there yet."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("not configured")


def test_an_object_that_cannot_be_looked_at_keeps_no_function_from_running() -> None:
    function = _in_module("def train_func():\n    return 1")
    function.__globals__["settings"] = _Proxy()
    assert preload_for(function, 2) == _GROUP

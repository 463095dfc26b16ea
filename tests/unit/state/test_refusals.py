"""Values that cannot be saved are refused with their path, and never pickled."""

from __future__ import annotations

import enum
import warnings
from collections import namedtuple
from typing import Any

import numpy
import pytest
import torch
from tests.unit.state.trips import in_memory, same

from holdfast.checkpoint.state.flatten import DEPTH_MAX
from holdfast.checkpoint.state.plan import plan
from holdfast.errors import ConfigError

Pair = namedtuple("Pair", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Exploding:
    def __reduce__(self) -> Any:
        raise AssertionError("somebody pickled it")


REFUSED = {
    "function": (lambda: None, "function cannot be saved"),
    "object": (Exploding(), "Exploding cannot be saved"),
    "module": (torch.nn.Linear(1, 1), "Linear cannot be saved"),
    "set": ({1}, "set cannot be saved"),
    "complex": (1j, "complex cannot be saved"),
    "namedtuple": (Pair(1, 2), "Pair cannot be saved"),
    "enum": (Colour.RED, "Colour cannot be saved"),
    "bytearray": (bytearray(b"x"), "bytearray cannot be saved"),
    "surrogate": ("\ud800", "lone surrogate"),
    "sparse": (torch.eye(3).to_sparse(), "sparse"),
    "meta": (torch.empty(3, device="meta"), "meta tensor"),
    "lazy": (torch.nn.LazyLinear(3).weight, "lazy|Uninitialized|uninitialized"),
    "objects": (numpy.array([{}], dtype=object), "Python objects"),
    "record": (numpy.zeros(2, dtype=[("a", "i4")]), "dtype"),
    "masked": (numpy.ma.masked_array([1], mask=[True]), "MaskedArray"),
    "matrix": (numpy.ma.masked_array([[1]])[0], "MaskedArray"),
}


@pytest.mark.parametrize("value, reason", REFUSED.values(), ids=REFUSED)
def test_unsupported_values_are_refused_with_their_path(value: Any, reason: str) -> None:
    state = {"model": torch.ones(2), "optimizer": {"param_groups": [{"lr": 0.1, "foo": value}], "state": {}}}
    with pytest.raises((TypeError, ConfigError), match=reason) as caught:
        plan(state)
    assert str(caught.value).startswith("optimizer.param_groups[0].foo: ")


def test_quantized_tensors_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop them.
        made = torch._empty_affine_quantized((2,), scale=1.0, zero_point=0, dtype=torch.qint8)
    with pytest.raises(TypeError, match=r"a\[5\]: a quantized tensor"):
        plan({"a": {5: made}})


@pytest.mark.parametrize("key", [b"bytes", frozenset(), Colour.RED, torch.float32, (1, b"x")], ids=repr)
def test_keys_of_other_kinds_are_refused(key: Any) -> None:
    with pytest.raises(TypeError, match=r"^a\[.*\]: a key of type .* cannot be saved"):
        plan({"a": {key: 1}})


def test_an_unsupported_top_level_value_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^the state itself: object cannot be saved"):
        plan(object())


def test_cyclic_structures_are_refused() -> None:
    state: dict[str, Any] = {"a": [1, {}]}
    state["a"][1]["up"] = state
    with pytest.raises(ConfigError, match=r"a\[1\]\.up\.a.*contains itself"):
        plan(state)


def test_nesting_beyond_the_limit_is_refused() -> None:
    def nested(levels: int) -> Any:
        value: Any = torch.ones(1)
        for level in range(levels):
            value = {"d": value} if level % 3 else ({"$d": value},) if level % 2 else [value]
        return value

    deepest = max(levels for levels in range(DEPTH_MAX + 1) if _depth(nested(levels)) <= DEPTH_MAX)
    assert same(in_memory(nested(deepest)), nested(deepest))
    with pytest.raises(ConfigError, match=f"nested deeper than {DEPTH_MAX} levels"):
        plan(nested(200))


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()))
    if isinstance(value, list | tuple):
        return 1 + max(map(_depth, value))
    return 0


def test_keys_nested_too_deeply_are_refused() -> None:
    key: Any = ()
    for _ in range(DEPTH_MAX + 2):
        key = (key,)
    with pytest.raises(ConfigError, match="nested too deeply"):
        plan({key: 1})


def test_a_refused_state_can_be_corrected_and_saved() -> None:
    state: dict[str, Any] = {"a": torch.eye(3).to_sparse()}
    with pytest.raises(TypeError):
        plan(state)
    state["a"] = state["a"].to_dense()
    assert same(in_memory(state), state)
    state["a"] = state["a"].to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        plan(state)

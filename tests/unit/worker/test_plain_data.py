"""Values that may be reported, and the errors about others."""

from __future__ import annotations

import enum
import math
import re
from collections import OrderedDict
from typing import Any

import msgspec
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.plain_data import plain_data, plain_metrics

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)


@given(st.dictionaries(TEXT, PLAIN, max_size=6))
def test_plain_metrics_round_trip_over_the_wire(metrics: dict[str, Any]) -> None:
    result = plain_metrics(metrics)
    assert same(result, metrics)
    assert same(msgspec.msgpack.decode(msgspec.msgpack.encode(result)), metrics)


@given(st.dictionaries(TEXT, LEAVES, max_size=4), st.lists(LEAVES, max_size=4))
def test_containers_of_other_kinds_become_dicts_and_lists(inner: dict[str, Any], items: list[Any]) -> None:
    result = plain_metrics({"a": OrderedDict(inner), "b": tuple(items)})
    assert type(result["a"]) is dict and same(result["a"], inner)
    assert type(result["b"]) is list and same(result["b"], items)


@given(st.recursive(LEAVES | st.binary() | st.complex_numbers() | st.sets(st.integers()), st.lists, max_leaves=8))
def test_whatever_is_accepted_can_be_sent(value: Any) -> None:
    try:
        result = plain_metrics({"value": value})
    except (TypeError, ValueError) as error:
        assert "metrics['value" in str(error)
    else:
        assert same(msgspec.msgpack.decode(msgspec.msgpack.encode(result)), {"value": value})


class _Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (numpy.float32(0.5), 0.5),
        (numpy.float64(0.5), 0.5),
        (numpy.int64(7), 7),
        (numpy.bool_(True), True),
        (numpy.str_("x"), "x"),
        (numpy.array(2.0), 2.0),
        (numpy.array([[2]]), 2),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([3]), 3),
        (torch.tensor(True), True),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (_Level.HIGH, 3),
    ],
)
def test_scalars_of_frameworks_become_python_numbers(value: Any, expected: Any) -> None:
    result = plain_metrics({"value": value})["value"]
    assert result == expected
    assert type(result) is type(expected)


def test_nan_stays_nan() -> None:
    assert math.isnan(plain_metrics({"loss": torch.tensor(math.nan)})["loss"])


@pytest.mark.parametrize(
    ("metrics", "error", "words"),
    [
        ({"a": {"b": torch.zeros(3)}}, ValueError, "metrics['a/b'] is torch.Tensor of 3 elements"),
        ({"a": numpy.zeros((2, 2))}, ValueError, "metrics['a'] is numpy.ndarray of 4 elements"),
        ({"a": torch.zeros(0)}, ValueError, "of 0 elements"),
        ({"a": [1, object()]}, TypeError, "metrics['a/1'] is object"),
        ({"a": {1: 2}}, TypeError, "metrics['a'] has the key 1 of type int"),
        ({1: 2}, TypeError, "metrics has the key 1 of type int"),
        ({"a": 1j}, TypeError, "metrics['a'] is complex"),
        ({"a": b"x"}, TypeError, "metrics['a'] is bytes"),
        ({"a": torch.tensor(1j)}, TypeError, "that holds complex"),
        ({"a": numpy.datetime64("2026-01-01")}, TypeError, "datetime64 that holds datetime.date"),
        ({"a": 2**64}, ValueError, "metrics['a'] is an int beyond 64 bits"),
        ({"a": "\ud800"}, ValueError, "metrics['a'] holds a lone surrogate"),
        ({"\ud800": 1}, ValueError, "holds a lone surrogate"),
        ([("a", 1)], TypeError, "takes its metrics as a dict with str keys, not list"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_unsupported_values_are_refused_with_their_path(metrics: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        plain_metrics(metrics)


def test_cyclic_values_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested deeper than 32 levels"):
        plain_metrics({"a": loop})


def test_bytes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"The return value\['a/0'\] is bytes"):
        plain_data({"a": [b"x"]}, "The return value")

"""Return values come back with their types, without a pickle."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch

from holdfast.core.json_floats import tag_floats, untag_floats
from holdfast.worker.return_value import decode_value, encode_value


def through_the_journal(value: Any) -> Any:
    """As the journal keeps it: msgpack over the wire, then JSON."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(encode_value(value)))
    return decode_value(untag_floats(json.loads(json.dumps(tag_floats(sent)))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2**80,
        float("inf"),
        "text",
        b"\x00\xff",
        [1, [2, (3, "x")]],
        {"a": {1: 2, (1, 2): {3, 4}}},
        {"$tuple": [1]},
        {"$set": 1, "$more": 2},
        frozenset({1}),
        datetime.datetime(2026, 11, 18, 1, 2, 3, 4, datetime.UTC),
        datetime.date(2026, 11, 18),
        datetime.time(1, 2),
        datetime.timedelta(days=1, microseconds=5),
        Path("/a/b"),
    ],
    ids=repr,
)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    again = through_the_journal(value)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64"])
def test_arrays_come_back(dtype: str) -> None:
    array: Any = numpy.arange(6).reshape(2, 3).astype(dtype)
    again = through_the_journal({"array": array})["array"]
    assert (again.dtype, again.shape) == (array.dtype, (2, 3))
    assert (again == array).all() and again.flags.writeable
    assert through_the_journal(numpy.zeros((0, 4))).shape == (0, 4)
    assert through_the_journal(numpy.float32(0.5)) == 0.5


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32])
def test_cpu_tensors_come_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype).t()
    again = through_the_journal([tensor])[0]
    assert again.dtype == dtype and torch.equal(again, tensor)
    assert through_the_journal(torch.tensor(3.5)).item() == 3.5
    assert through_the_journal(torch.empty(0, 2)).shape == (0, 2)


class Own:
    """A class of the user's."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [Own()]}, r"holds .*test_return_value.Own, which is not kept, so result.return_value is None"),
        (len, "holds builtin_function_or_method"),
        (numpy.array([None]), "holds numpy.ndarray"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_what_cannot_be_kept_is_named_by_its_type(value: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        encode_value(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="nested deeper than 32 levels"):
        encode_value(value)


@pytest.mark.parametrize("dtype", ["O", "U4"])
def test_an_array_that_a_stranger_wrote_holds_numbers_only(dtype: str) -> None:
    with pytest.raises(ValueError):
        decode_value({"$ndarray": {"dtype": dtype, "shape": [1], "data": "AAAAAAAAAAA="}})

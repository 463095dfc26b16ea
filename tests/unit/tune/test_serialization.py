"""Spaces and components as JSON and back; what cannot be stored is asked for; storage cannot name any function."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import tune
from holdfast.errors import ConfigError
from holdfast.tune.search import BasicVariantGenerator, ConcurrencyLimiter
from holdfast.tune.search.variant_generator import merge_configs
from holdfast.tune.serialization import from_json, is_stored_whole, to_json

scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text()
spaces = st.recursive(
    scalars | st.builds(tune.uniform, st.floats(0, 1), st.floats(2, 3)) | st.just(tune.choice(["a", (1, 2)])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("$tune"), inner, max_size=3)
    ),
    max_leaves=12,
)


def through_json(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value), allow_nan=False)), "param_space")


@given(spaces)
def test_any_space_survives_json(space: Any) -> None:
    assert through_json(space) == space


def test_every_kind_of_domain_survives_json() -> None:
    space = {
        "floats": [tune.uniform(0, 1), tune.quniform(0, 1, 0.5), tune.loguniform(1, 2), tune.qloguniform(1, 2, 0.5)],
        "normal": [tune.randn(1, 2), tune.qrandn(1, 2, 0.5)],
        "integers": [tune.randint(1, 5), tune.qrandint(1, 5, 2), tune.lograndint(1, 5), tune.qlograndint(1, 5, 2)],
        "choice": tune.choice([{"a": tune.uniform(0, 1)}, (1, 2), None]),
        "grid": tune.grid_search([1, 2]),
        "function": tune.sample_from(merge_configs),
        "timeout": timedelta(minutes=1),
    }
    assert through_json(space) == space
    assert is_stored_whole(space)
    assert str(through_json(float("nan"))) == "nan"


def test_scalars_of_numpy_are_plain_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert to_json({"a": numpy.float32(0.5), "b": numpy.int64(3)}) == {"a": 0.5, "b": 3}
    # These are derived from Python's own classes, and yet nothing that an encoder knows.
    form = to_json([*numpy.linspace(0, 1, 3), numpy.str_("x"), {numpy.str_("key"): numpy.float64("nan")}])
    assert msgspec.json.decode(msgspec.json.encode(form)) == form
    again = from_json(form, "param_space")
    assert again[:4] == [0.0, 0.5, 1.0, "x"] and math.isnan(again[4]["key"])


def test_scalars_of_numpy_that_are_no_plain_numbers_cannot_be_stored() -> None:
    numpy = pytest.importorskip("numpy")
    for value in (numpy.longdouble(1), numpy.complex64(1j), numpy.datetime64("2020-01-01"), numpy.array(object())):
        assert not is_stored_whole(value), repr(value)


class _Number(int):
    """As enumerations are."""


class _Text(str):
    def __str__(self) -> str:
        return "something else"


def test_of_what_is_derived_from_a_number_or_a_string_the_plain_value_is_left() -> None:
    form = to_json([_Number(3), _Text("x"), {_Text("y"): 1}])
    assert json.loads(msgspec.json.encode(form)) == [3, "x", {"y": 1}]


@pytest.mark.parametrize("value", [len, math.sqrt, int, OrderedDict, "a\udcff", {"a\udcff": 1}])
def test_what_storage_may_not_name_or_hold_cannot_be_stored(value: Any) -> None:
    """Functions of Python's own, which `from_json` refuses, and strings that are no text."""
    assert not is_stored_whole([value])
    msgspec.json.encode(to_json([value]))


def test_a_component_is_made_again_from_its_arguments() -> None:
    made = ConcurrencyLimiter(BasicVariantGenerator([{"a": 1}], random_state=3), max_concurrent=2)
    again = through_json(made)
    assert isinstance(again, ConcurrencyLimiter) and isinstance(again.searcher, BasicVariantGenerator)
    assert again.max_concurrent == 2
    for one in (made, again):
        one.set_search_properties("loss", "min", {"a": tune.uniform(0, 9), "b": tune.uniform(0, 1)}, num_samples=2)
    assert [made.suggest(name) for name in "ab"] == [again.suggest(name) for name in "ab"]


def test_what_cannot_be_stored_is_asked_for() -> None:
    space = {"a": tune.sample_from(lambda: 3)}
    stored = to_json(space)
    assert stored == to_json({"a": tune.sample_from(lambda: 3)}), "two scripts can be compared"
    assert not is_stored_whole(space)
    with pytest.raises(ConfigError, match=r"The param_space of this experiment holds the function .*<lambda>"):
        from_json(stored, "param_space")
    with pytest.raises(ConfigError, match=r"holds an object of builtins\.object, .*: give param_space"):
        from_json(to_json([object()]), "param_space", "give param_space")


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:exec",
        "subprocess:getoutput",
        "subprocess:Popen",
        "nowhere_at_all:f",
        "holdfast.tune:gone",
    ],
)
def test_storage_cannot_name_any_function(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        from_json({"$tune": "function", "name": name}, "param_space")
    with pytest.raises(ConfigError, match=name):
        from_json({"$tune": "component", "name": name, "items": ["true"]}, "search_alg")


def test_a_form_of_a_later_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="written by another version"):
        from_json({"$tune": "domain", "name": "zipf", "arguments": {}}, "param_space")

"""Any nested structure round-trips, with a new plan or a cached one."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.state.trips import in_memory, same

keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["$tensor", "$", "$dict"])
    | st.binary(max_size=8)
)
leaves = st.sampled_from(
    [
        torch.arange(3),
        torch.ones(2, 2).t(),
        torch.empty(0),
        torch.tensor(1, dtype=torch.complex128),
        numpy.arange(2.0),
        numpy.float32(1),
        torch.float32,
        torch.Size([1]),
    ]
)
structures = st.recursive(
    plain | leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["a", "a.b", "b", "$x"]), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(structures)
def test_any_structure_round_trips(state: Any) -> None:
    assert same(in_memory(state), state)
    assert same(in_memory(state), state), "and again, when the structure is known"

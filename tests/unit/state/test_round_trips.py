"""States round-trip bit for bit: every dtype and memory layout."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.unit.state.trips import bits, in_memory, on_disk, same

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)} - QUANTIZED, key=str)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all, not only numbers: NaNs with payloads, denormals."""
    count = dtype.itemsize
    for length in shape:
        count *= length
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_bit_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = {
        "matrix": random_bits(dtype, 3, 5),
        "scalar": random_bits(dtype, 1).view(()),
        "empty": random_bits(dtype, 0),
        "hollow": random_bits(dtype, 3, 0, 2),
        "turned": random_bits(dtype, 4, 6).t(),
        "stepped": random_bits(dtype, 8, 3)[::2],
        "expanded": random_bits(dtype, 1, 3).expand(4, 3),
        "odd": random_bits(torch.uint8, 3),
    }
    for back in (on_disk(state, tmp_path), in_memory(state)):
        assert same(state, back)
        assert back["matrix"].is_contiguous() and back["turned"].is_contiguous()
        back["matrix"].view(torch.uint8).zero_()  # It is writable memory of the reader's own.
    assert same(state, on_disk(state, tmp_path)), "writing to what was loaded changed the files"


def test_all_dtypes_of_torch_are_covered() -> None:
    assert {torch.float32, torch.bfloat16, torch.complex128, torch.float8_e5m2, torch.uint64, torch.bool} <= set(DTYPES)
    assert len(DTYPES) > 40


def test_conjugate_and_negative_bits_are_resolved() -> None:
    complex_ = torch.randn(3, 4, dtype=torch.complex64)
    state = {"conjugate": complex_.conj(), "negative": complex_.conj().imag, "both": complex_.conj()}
    assert state["conjugate"].is_conj() and state["negative"].is_neg()
    back = in_memory(state)
    assert same(state, back)
    assert not back["conjugate"].is_conj() and not back["negative"].is_neg()


def test_a_conjugate_is_no_alias_of_its_original() -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    assert same(in_memory({"a": tensor, "b": tensor.conj()}), {"a": tensor, "b": tensor.conj()})


def test_shared_tensors_are_written_once_and_loaded_as_one(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(1000, 64)
    head = torch.nn.Linear(64, 1000, bias=False)
    head.weight = embedding.weight
    state = {"embedding": embedding.state_dict(), "head": head.state_dict(), "other": embedding.weight.detach()[:1]}
    back = on_disk(state, tmp_path)
    assert same(dict(embedding.state_dict()), back["embedding"])
    assert back["head"]["weight"] is back["embedding"]["weight"]
    assert back["other"].data_ptr() != back["head"]["weight"].data_ptr(), "a mere view is a tensor of its own"
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert written < 1.1 * 1000 * 64 * 4


def test_different_views_of_one_storage_round_trip() -> None:
    base = torch.arange(12.0)
    state = {"a": base.view(3, 4), "b": base.view(4, 3), "c": base[:6], "d": base[6:], "e": base.view(torch.int32)}
    assert same(in_memory(state), state)


def test_parameters_and_requires_grad_round_trip() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    (weight.sum() * 2).backward()
    back = in_memory({"weight": weight, "gradient": weight.grad, "doubled": weight * 2})
    assert back["weight"].equal(weight) and not back["weight"].requires_grad
    assert type(back["weight"]) is torch.Tensor
    assert back["gradient"].equal(weight.grad)


@pytest.mark.parametrize(
    "array",
    [
        *(numpy.arange(6).astype(code).reshape(2, 3) for code in "?bhilqBHILQefdgFDG"),
        numpy.arange(6, dtype=">i4"),
        numpy.array(["ab", "cde", ""]),
        numpy.array([b"ab", b"cde"]),
        numpy.array(["2020-01-01", "NaT"], dtype="M8[ns]"),
        numpy.array([1, 2], dtype="m8[s]"),
        numpy.empty((0, 3)),
        numpy.float64(0.1),
        numpy.float32("nan"),
        numpy.bool_(True),
        numpy.int8(-1),
        numpy.str_("text"),
        numpy.array(5),
        numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
        numpy.arange(10)[::-2],
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype.str}-{array.shape}",
)
def test_numpy_arrays_round_trip_bit_exactly(array: Any, tmp_path: Path) -> None:
    for back in (on_disk({"a": array}, tmp_path), in_memory({"a": array})):
        assert same({"a": array}, back)
        if isinstance(array, numpy.ndarray):
            assert back["a"].flags.writeable


def test_an_array_that_occurs_twice_is_loaded_as_one() -> None:
    array = numpy.arange(3)
    back = in_memory([array, array, array.copy()])
    assert back[0] is back[1] and back[2] is not back[0]


def test_plain_values_of_every_kind_round_trip() -> None:
    state = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**200)],
        "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, float("nan"), float("inf"), float("-inf"), 1e22, 3.0],
        "text": ["", "ünïcödé", "\x00", "$tensor"],
        "bytes": [b"", bytes(range(256))],
        "tuples": ((), (1,), (1, (2, [3]))),
        "empty": {},
        "keys": {1: "int", "1": "str", 2.5: "float", None: "none", (1, "a", (None,)): "tuple", float("inf"): 1},
        "bool key": {True: 1, "$x": 2},
        "dollar": {"$tensor": "name", "$dict": []},
        "counter": Counter("abracadabra"),
        "torch": [torch.float16, torch.Size([2, 3]), torch.device("cuda", 1), torch.device("cpu")],
    }
    back = in_memory(state)
    assert same(state, back)
    assert isinstance(back["counter"], Counter)
    assert isinstance(back["torch"][1], torch.Size)


def test_subclasses_are_loaded_as_their_base_classes() -> None:
    class Text(str):
        __slots__ = ()

    back = in_memory({"a": OrderedDict(x=1), "b": Text("t"), "c": torch.__version__})
    assert same(back, {"a": {"x": 1}, "b": "t", "c": str(torch.__version__)})


@pytest.mark.parametrize("state", [None, 3, [], (), {}, "text", torch.ones(2), numpy.ones(2)], ids=repr)
def test_a_state_need_not_be_a_dict(state: Any, tmp_path: Path) -> None:
    assert same(on_disk(state, tmp_path), state)


def test_keys_that_give_the_same_tensor_name_are_distinguished() -> None:
    state = {
        "a": {"b": torch.tensor(1)},
        "a.b": torch.tensor(2),
        "a.b#2": torch.tensor(3),
        "__metadata__": torch.tensor(4),
        "": torch.tensor(5),
        1: torch.tensor(6),
        "1": torch.tensor(7),
    }
    assert same(in_memory(state), state)


def test_map_location_and_its_limits(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    assert on_disk({"a": tensor}, tmp_path, map_location="cpu")["a"].equal(tensor)
    assert on_disk({"a": tensor}, tmp_path, map_location=torch.device("meta"))["a"].is_meta
    with pytest.raises(TypeError, match="map_location must be a device"):
        on_disk({"a": tensor}, tmp_path, map_location={"cuda:0": "cpu"})


def test_the_bit_comparison_detects_differences() -> None:
    assert bits(torch.tensor([0.0])) != bits(torch.tensor([-0.0]))

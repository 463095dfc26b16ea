"""Our safetensors files and those of the library are compatible; damaged and forged files give an error."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from tests.unit.state.trips import bits, contents

from holdfast.checkpoint.state.plan import plan
from holdfast.checkpoint.state.safetensors import HEADER_MAX_BYTES, parse_header
from holdfast.errors import Damaged

LIBRARY_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    found = {f"of.{dtype}": torch.arange(6).view(2, 3).to(dtype) for dtype in LIBRARY_DTYPES}
    return {**found, "empty": torch.empty(0, 3), "scalar": torch.tensor(1.5), 'ünïcode\n"': torch.ones(1)}


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    given = tensors()
    plan(given).write_files(tmp_path)
    found = safetensors.torch.load_file(tmp_path / "state.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)
    with safetensors.safe_open(tmp_path / "state.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_safetensors_library_reads_unknown_dtypes_as_bytes(tmp_path: Path) -> None:
    plan({"a": torch.ones(2, 3, dtype=torch.complex128)}).write_files(tmp_path)
    found = safetensors.torch.load_file(tmp_path / "state.safetensors")["a"]
    assert found.dtype == torch.uint8 and found.shape == (2, 3, 16)


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    given = tensors()
    data = safetensors.torch.save(given)
    found = parse_header(memoryview(data), "theirs")
    assert found.keys() == given.keys()
    for name, entry in found.items():
        assert entry.shape == given[name].shape
        assert data[entry.start : entry.end] == bits(given[name])
    data = safetensors.numpy.save({"a": numpy.arange(5)}, metadata={"who": "they"})
    assert parse_header(memoryview(data), "theirs")["a"].code == "I64"


def file(header: Any, data: bytes = b"", length: int | None = None) -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(start: Any = 0, end: Any = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, end]}


FORGED = {
    "nothing": memoryview(b""),
    "seven bytes": memoryview(b"\x01" * 7),
    "a header beyond the file": file({}, length=1000),
    "a header beyond all bounds": file({}, length=2**64 - 1),
    "a header just beyond the limit": file({}, length=HEADER_MAX_BYTES + 1),
    "no JSON": file(b"{"),
    "not UTF-8": file(b'{"\xff": 1}'),
    "a list": file([]),
    "blanks first": file(b"  {}"),
    "a number": file(5),
    "a pickle": file(b"\x80\x04cos\nsystem\n(S'false'\ntR."),
    "a zip": memoryview(b"PK\x03\x04" + b"\0" * 100),
    "deep": file(b"[" * 100_000),
    "deep object": file(b'{"a":' * 100_000),
    "an entry that is none": file({"a": 5}),
    "an entry without fields": file({"a": {}}),
    "a dtype that is none": file({"a": entry(dtype="F99")}, b"\0" * 4),
    "a dtype that is a list": file({"a": entry(dtype=[])}, b"\0" * 4),
    "a shape that is none": file({"a": entry(shape="x")}, b"\0" * 4),
    "a negative length": file({"a": entry(shape=(-1,))}, b"\0" * 4),
    "two negative lengths": file({"a": entry(shape=(-1, -1))}, b"\0" * 4),
    "a fractional length": file({"a": entry(shape=(1.0,))}, b"\0" * 4),
    "a length that is true": file({"a": entry(shape=(True,))}, b"\0" * 4),
    "a length beyond bounds": file({"a": entry(shape=(2**62, 4))}, b"\0" * 4),
    "a product that wraps around": file({"a": entry(end=0, shape=(2**32, 2**32))}),
    "too many dimensions": file({"a": entry(shape=(1,) * 1000)}, b"\0" * 4),
    "endless digits": file(b'{"a": {"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,4]}}', b"\0" * 4),
    "offsets that are none": file({"a": {**entry(), "data_offsets": 3}}, b"\0" * 4),
    "three offsets": file({"a": {**entry(), "data_offsets": [0, 4, 8]}}, b"\0" * 4),
    "negative offsets": file({"a": entry(-4, 0)}),
    "offsets the wrong way round": file({"a": entry(4, 0)}, b"\0" * 4),
    "a hole in front": file({"a": entry(4, 8)}, b"\0" * 8),
    "a hole between": file({"a": entry(), "b": entry(8, 12)}, b"\0" * 12),
    "an overlap": file({"a": entry(), "b": entry(2, 6)}, b"\0" * 6),
    "the same place twice": file({"a": entry(), "b": entry()}, b"\0" * 4),
    "bytes that nobody owns": file({"a": entry()}, b"\0" * 8),
    "too few bytes": file({"a": entry()}, b"\0" * 3),
    "bytes without tensors": file({}, b"\0"),
    "a name twice": file(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"\0" * 4),
    "a field twice": file(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
    "metadata that are none": file({"__metadata__": 5}),
    "metadata of numbers": file({"__metadata__": {"a": 5}}),
    "a constant": file(b'{"a": NaN}'),
}


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_forged_headers_are_damage(data: memoryview) -> None:
    with pytest.raises(Damaged, match=r"^/some/where\.safetensors is no sound safetensors file"):
        parse_header(data, "/some/where.safetensors")


def test_a_valid_file_passes_the_header_checks() -> None:
    assert parse_header(file({"a": entry()}, b"\0" * 4), "")["a"].shape == (1,)
    assert parse_header(file(b"{}  "), "") == {}


def test_no_flipped_or_missing_byte_of_a_header_gives_another_error() -> None:
    data = contents(plan({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.float64)}))["state.safetensors"]
    length = 8 + int.from_bytes(data[:8], "little")
    generator = random.Random(5)
    damaged = 0
    for at in range(length):
        bad = bytearray(data)
        bad[at] ^= 1 << generator.randrange(8)
        damaged += _is_damage(bytes(bad))
    assert damaged > length * 0.6, "most bytes of a header matter"
    assert all(_is_damage(data[:at]) for at in range(len(data)))


def _is_damage(data: bytes) -> bool:
    try:
        parse_header(memoryview(data), "x")
    except Damaged:
        return True
    return False

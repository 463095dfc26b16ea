"""The manifest's codec: round trips, and every alteration is noticed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.manifest import Manifest, check_metrics, decode, encode, is_torn
from holdfast.core.checkpoint_types import FileEntry
from holdfast.errors import ConfigError, Damaged, UnsupportedFormat

HASH = "a" * 64
ONE = Manifest(
    name="checkpoint_000009",
    index=9,
    epoch=2,
    token="t",
    created_at="2026-11-15T00:00:00.000Z",
    writer="host:1",
    metrics={"loss": 0.5, "nan": math.nan, "deep": [{"inf": -math.inf}]},
    files=(FileEntry(path="layers/model.pt", size_bytes=3, blake3=HASH, rank=1),),
)

part = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=8)
leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
metrics = st.dictionaries(
    part | st.sampled_from(["$float", "$$float", "$"]),
    st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(part | st.just("$float"), inner)),
    max_size=4,
)
files = st.lists(st.integers(0, 2**60), max_size=4).map(
    lambda sizes: tuple(
        FileEntry(path=f"d/{at}.bin", size_bytes=size, blake3=blake3(bytes([at])).hexdigest(), rank=at)
        for at, size in enumerate(sizes)
    )
)


def sealed(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, separators=(",", ":")).encode()
    return text[:-1] + b',"self":"' + blake3(text).hexdigest().encode() + b'"}\n'


def plain(**changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode(ONE))
    del body["self"]
    return {**body, **changes}


@given(metrics, files, st.integers(0, 10**9), st.booleans(), part)
def test_manifest_round_trip(
    metrics: dict[str, Any], files: tuple[FileEntry, ...], index: int, void: bool, name: str
) -> None:
    manifest = msgspec.structs.replace(ONE, metrics=metrics, files=files, index=index, void=void, name=name)
    data = encode(manifest)
    assert decode(data, "here") == manifest
    assert data.count(b"\n") == 1
    assert json.loads(data)["index"] == index


def test_nan_and_infinity_round_trip() -> None:
    found = decode(encode(ONE), "here")
    assert math.isnan(found.metrics["nan"])
    assert found.metrics["deep"] == [{"inf": -math.inf}]
    json.loads(encode(ONE), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_any_flipped_byte_is_damage() -> None:
    data = encode(ONE)
    for at in range(len(data)):
        for flip in (1, 0x20, 0x80):
            altered = bytearray(data)
            altered[at] ^= flip
            with pytest.raises(Damaged, match=r"here.*(seal|format)"):
                decode(bytes(altered), "here")


def test_any_truncation_is_damage_and_torn() -> None:
    data = encode(ONE)
    for length in range(len(data)):
        with pytest.raises(Damaged):
            decode(data[:length], "here")
        assert is_torn(data[:length])
    assert not is_torn(data)
    with pytest.raises(Damaged):
        decode(data + b"x", "here")


@given(st.binary(max_size=200))
def test_random_bytes_are_damage(noise: bytes) -> None:
    with pytest.raises(Damaged):
        decode(noise, "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "holdfast.checkpoint/x"},
        {"format": "elsewhere/1.0"},
        {"index": "9"},
        {"files": [{"path": "../up", "size_bytes": 1, "blake3": HASH}]},
        {"files": [{"path": "/etc/passwd", "size_bytes": 1, "blake3": HASH}]},
        {"files": [{"path": "a//b", "size_bytes": 1, "blake3": HASH}]},
        {"files": [{"path": ".manifest.json", "size_bytes": 1, "blake3": HASH}]},
        {"files": [{"path": "a", "size_bytes": -1, "blake3": HASH}]},
        {"files": [{"path": "a", "size_bytes": 1, "blake3": "A" * 64}]},
        {"files": [{"path": "a", "size_bytes": 1, "blake3": HASH}] * 2},
        {"metrics": {"x": {"$float": "many"}}},
        {"metrics": {"x": {"$float": []}}},
    ],
)
def test_invalid_content_with_a_valid_checksum_is_damage(changes: dict[str, Any]) -> None:
    with pytest.raises(Damaged, match="does not follow the format"):
        decode(sealed(plain(**changes)), "here")


def test_newer_format_versions() -> None:
    newer_minor = sealed(plain(format="holdfast.checkpoint/1.7", invented={"a": 1}))
    assert decode(newer_minor, "here").files == ONE.files
    with pytest.raises(UnsupportedFormat, match="upgrade holdfast"):
        decode(sealed({"format": "holdfast.checkpoint/2.0", "everything": "else"}), "here")


def test_metrics_that_no_reader_could_read_are_refused() -> None:
    for bad in ({"x": object()}, {"x": {(1, 2): 3}}, {"x": "\ud800"}):
        with pytest.raises(ConfigError, match="metrics"):
            check_metrics(bad)
    assert check_metrics(None) == {}


def test_the_example_of_the_format_description_is_valid() -> None:
    """docs/store-format.md shows a manifest byte for byte, and the hash of its body."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "store-format.md").read_text()
    found = re.search(r"<!-- example -->\n```json\n(.*?\n)```", text, re.DOTALL)
    assert found is not None
    data = found[1].encode()
    manifest = decode(data, "the example")
    assert encode(manifest) == data
    body = data[: data.rindex(b',"self"')] + b"}"
    assert f"`{blake3(body).hexdigest()}`" in text
    assert f"{len(body)} bytes" in text

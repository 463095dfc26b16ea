"""The event encoder against known sums and against the protobuf classes of TensorBoard."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from holdfast.views.files.tfevents import crc32c, scalars_event, session_event, version_event

_TAGS = st.text(st.characters(codec="utf-8"), max_size=300)


def _message(frame: bytes) -> Any:
    (size_bytes,) = struct.unpack("<Q", frame[:8])
    assert len(frame) == size_bytes + 16
    assert frame[8:12] == _masked(frame[:8])
    assert frame[-4:] == _masked(frame[12:-4])
    event = Event()
    event.ParseFromString(frame[12:-4])
    return event


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@pytest.mark.parametrize(
    ("data", "crc"), [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)]
)
def test_crc32c_test_vectors(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def test_an_event_file_begins_with_its_version_and_a_session() -> None:
    assert _message(version_event(12.5)).file_version == "brain.Event:2"
    event = _message(session_event(12.5, 300))
    assert (event.wall_time, event.step, event.session_log.status) == (12.5, 300, SessionLog.START)


@given(
    st.floats(0, 4e9),
    st.integers(0, 2**40),
    st.dictionaries(_TAGS, st.floats(width=32, allow_nan=False), min_size=1),
)
def test_scalars_round_trip_with_a_valid_checksum(at: float, step: int, metrics: dict[str, float]) -> None:
    event = _message(scalars_event(at, step, metrics))
    assert (event.wall_time, event.step) == (at, step)
    assert {value.tag: value.simple_value for value in event.summary.value} == metrics


def test_only_numbers_become_scalars() -> None:
    event = _message(scalars_event(1.0, 2, {"name": "resnet", "acc": 0.5, "none": None, "list": [1], "ok": True}))
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [("acc", 0.5), ("ok", 1.0)]
    assert scalars_event(1.0, 2, {"name": "resnet"}) == b""
    assert scalars_event(1.0, 2, {}) == b""


def test_values_beyond_float32_become_infinite() -> None:
    values = {"up": 1e300, "down": -1e300, "nan": math.nan, "big": 2**64 - 1, "one": 1.0}
    found = {value.tag: value.simple_value for value in _message(scalars_event(1.0, 2, values)).summary.value}
    assert math.isnan(found.pop("nan"))
    assert found == {"up": math.inf, "down": -math.inf, "big": 2.0**64, "one": 1.0}


def test_a_reused_event_template_keeps_no_old_values(tmp_path: Path) -> None:
    first = scalars_event(1.0, 5, {"a": 1.0, "b": 2.0})
    scalars_event(9.0, 7, {"a": 3.0, "b": 4.0})
    assert scalars_event(1.0, 5, {"a": 1.0, "b": 2.0}) == first

"""Frames over a real socket pair: messages arrive unchanged, however the stream is cut."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.commands import AnnounceCheckpoint
from holdfast.core.events import Ticket
from holdfast.errors import WireError
from holdfast.wire import frames
from holdfast.wire.envelope import Envelope
from holdfast.wire.messages import Collected, ToWorker

_decoder: frames.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_messages_arrive_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    sent = [AnnounceCheckpoint(ticket=Ticket(1, n), name=f"checkpoint_{n}") for n in range(50)]
    for message in sent:
        frames.send(left, message)
    assert [frames.receive(right, _decoder) for _ in sent] == sent
    left.close()
    assert frames.receive(right, _decoder) is None


def test_a_truncated_message_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.sendall(frames.encode(Collected(generation=1, sequence=1))[:-1])
    left.close()
    with pytest.raises(WireError, match="in the middle"):
        frames.receive(right, _decoder)


def test_an_unknown_message_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    frames.send(left, {"type": "Nonsense"})
    with pytest.raises(WireError, match="none of those expected"):
        frames.receive(right, _decoder)


def test_a_huge_length_prefix_is_refused_before_the_body_is_read(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    left.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match="at most"):
        frames.receive(right, _decoder)
    with pytest.raises(WireError, match="at most 10"):
        frames.Splitter(limit_bytes=10).feed(b"\0\0\0\x0b")


@given(bodies=st.lists(st.binary(max_size=200), max_size=20), cuts=st.lists(st.integers(1, 300), min_size=1))
def test_the_splitter_works_wherever_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    splitter = frames.Splitter()
    out: list[bytes] = []
    turn = 0
    while stream:
        step = cuts[turn % len(cuts)]
        turn += 1
        out += splitter.feed(stream[:step])
        stream = stream[step:]
    assert out == bodies
    assert splitter.pending_bytes == 0


def test_a_message_that_is_encoded_once_arrives_in_every_envelope_as_if_it_were_encoded_for_it() -> None:
    message = Collected(generation=1, sequence=2, data={"loss": 0.5})
    body = frames.encode_body(message)
    for agent, sequence in (("a", 1), ("b", 300)):
        expected = frames.encode(Envelope("run-1", agent, sequence, 7, message))
        assert frames.encode(Envelope("run-1", agent, sequence, 7, body)) == expected


def test_a_message_for_several_receivers_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match=r"A Collected of \d+ bytes is more than the 100"):
        frames.encode_body(Collected(generation=1, sequence=2, data="x" * 100))

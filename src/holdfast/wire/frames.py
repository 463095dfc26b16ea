"""Frames: four bytes of length, then one msgpack message; the same over TCP and over socket pairs.

`channel` uses `encode` and `Splitter` inside asyncio; workers and the zygote use `send` and `receive`, which
block and need no thread. A frame is written with one `sendall`, so that a report costs its caller a system call
and no more.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import WireError

__all__ = ["HEADER_BYTES", "MAX_FRAME_BYTES", "Decoder", "Splitter", "encode", "encode_body", "receive", "send"]

_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""The largest message that a peer who proved itself may send."""

_RECEIVE_BYTES = 256 * 1024

_encoder = msgspec.msgpack.Encoder()

_M_co = TypeVar("_M_co", covariant=True)


class Decoder(Protocol[_M_co]):
    """What turns a frame's body into a message: a `msgspec.msgpack.Decoder` of the expected union."""

    def decode(self, buf: Any, /) -> _M_co: ...


def encode(message: Any, name: str | None = None) -> bytes:
    """The whole frame of one message, header included; `name` is its name in the error if it is too large."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    size_bytes = len(buffer) - HEADER_BYTES
    _check_size(size_bytes, name or type(message).__name__)
    _LENGTH.pack_into(buffer, 0, size_bytes)
    return bytes(buffer)


def encode_body(message: Any) -> msgspec.Raw:
    """One message encoded for several receivers: `encode` copies it into each one's envelope."""
    body = _encoder.encode(message)
    _check_size(len(body), type(message).__name__)
    return msgspec.Raw(body)


def _check_size(size_bytes: int, name: str) -> None:
    if size_bytes > MAX_FRAME_BYTES:
        raise WireError(
            f"A {name} of {size_bytes} bytes is more than the {MAX_FRAME_BYTES} that are"
            " allowed: put large data into a checkpoint or into storage, not into metrics or a configuration."
        )


class Splitter:
    """Splits a stream into the bodies of frames. Raises `WireError` as soon as a header announces more than
    `limit_bytes`."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._data: bytes | bytearray = b""
        self._start = 0
        """Where the first frame begins that was not given out."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes in; give out every body that is whole now."""
        self.append(data)
        bodies: list[bytes] = []
        while (body := self.next()) is not None:
            bodies.append(body)
        return bodies

    def append(self, data: bytes) -> None:
        """Take bytes in."""
        if not self.pending_bytes:
            self._data = data  # most often these are whole frames: nothing is copied but their bodies
        elif isinstance(self._data, bytearray):
            del self._data[: self._start]
            self._data += data
        else:
            self._data = bytearray(self._data[self._start :])
            self._data += data
        self._start = 0

    def next(self) -> bytes | None:
        """The body of the next frame, if it is whole."""
        start = self._start + HEADER_BYTES
        if start > len(self._data):
            return None
        (size_bytes,) = _LENGTH.unpack_from(self._data, self._start)
        if size_bytes > self.limit_bytes:
            raise WireError(f"A frame of {size_bytes} bytes is announced where at most {self.limit_bytes} are allowed.")
        end = start + int(size_bytes)
        if end > len(self._data):
            return None
        if isinstance(self._data, bytes):
            body = self._data[start:end]
        else:
            with memoryview(self._data) as view:
                body = bytes(view[start:end])
        if end == len(self._data):
            self.clear()
        else:
            self._start = end
        return body

    def clear(self) -> None:
        """Forget what was not given out."""
        self._data, self._start = b"", 0

    @property
    def pending_bytes(self) -> int:
        """Bytes that were not given out. At the end of a stream, when all whole frames were: it was cut."""
        return len(self._data) - self._start


def send(connection: socket.socket, message: Any) -> None:
    """Write one message to a blocking socket."""
    connection.sendall(encode(message))


def receive(connection: socket.socket, decoder: Decoder[_M_co], limit_bytes: int = MAX_FRAME_BYTES) -> _M_co | None:
    """Read one message from a blocking socket; None where the peer closed it between two messages."""
    header = _read(connection, HEADER_BYTES)
    if not header:
        return None
    (size_bytes,) = _LENGTH.unpack(header)
    if size_bytes > limit_bytes:
        raise WireError(f"A frame of {size_bytes} bytes is announced where at most {limit_bytes} are allowed.")
    body = _read(connection, size_bytes)
    if len(body) < size_bytes:
        raise WireError("The peer closed the connection in the middle of a message.")
    try:
        return decoder.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"The peer sent a message that is none of those expected: {error}.") from error


def _read(connection: socket.socket, size_bytes: int) -> bytes:
    """Exactly `size_bytes`; nothing at all at a clean end; `WireError` at an end in between."""
    data = bytearray()
    while len(data) < size_bytes:
        block = connection.recv(min(size_bytes - len(data), _RECEIVE_BYTES))
        if not block:
            if data:
                raise WireError("The peer closed the connection in the middle of a message.")
            break
        data += block
    return bytes(data)

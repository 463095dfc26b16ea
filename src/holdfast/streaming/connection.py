"""A blocking connection to or from the storage server: TLS, the handshake, frames, and the bytes of files.

Blocking sockets and threads rather than an event loop, since all that happens here is the copying of bytes: the
interpreter's lock is released while they are received, encrypted, hashed and written. Loopback is plain, any other
address is encrypted, as everywhere (`wire.channel`).
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.errors import AccessDenied, Unavailable, WireError
from holdfast.storage.hashing import blocks
from holdfast.storage.store import InMemory, OnBytes, Source
from holdfast.streaming.messages import CHUNK_HEADER, CHUNK_MAX_BYTES, Reply, Request
from holdfast.wire import auth, frames
from holdfast.wire.hello import Hello
from holdfast.wire.join_string import format_address, is_loopback
from holdfast.wire.tls import client_context, fingerprint_of

__all__ = ["BLOCK_BYTES", "Connection", "accept", "dial"]

BLOCK_BYTES = 2 * 1024 * 1024
HANDSHAKE_TIMEOUT_S = 10.0
_PEER_TIMEOUT_S = 30
"""A peer whose machine does not acknowledge what is sent for so long is gone."""
_T = TypeVar("_T")

_challenges: msgspec.msgpack.Decoder[auth.Challenge] = msgspec.msgpack.Decoder(auth.Challenge)
_proofs: msgspec.msgpack.Decoder[auth.Proof] = msgspec.msgpack.Decoder(auth.Proof)
_verdicts: msgspec.msgpack.Decoder[auth.Accepted | auth.Rejected] = msgspec.msgpack.Decoder(
    auth.Accepted | auth.Rejected
)


class Connection:
    """One authenticated connection; used by one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._chunk_left = 0

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """End the connection also for a thread that waits in it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close this process's descriptor only: the connection belongs to the process that this one was forked from."""
        with suppress(OSError):
            os.close(self._socket.detach())

    @property
    def is_idle(self) -> bool:
        """Whether nothing has come since the last reply, which could only be the end of the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def set_timeout(self, timeout_s: float | None) -> None:
        """Let a peer that sends or takes nothing for so long be an error."""
        self._socket.settimeout(timeout_s)

    def send(self, message: Request | Reply) -> None:
        frames.send(self._socket, message)

    def receive(self, decoder: frames.Decoder[_T]) -> _T | None:
        """The next message; None at the end of the connection."""
        return frames.receive(self._socket, decoder)

    # ------------------------------------------------------------------ the bytes of files

    def send_chunks(self, source: Source, on_bytes: OnBytes | None) -> None:
        """Send a file or memory as chunks; `InterruptedError` as soon as the peer answers before the end."""
        if isinstance(source, InMemory):
            for block in blocks(source, None, on_bytes, BLOCK_BYTES):
                self._send_chunk(block)
        elif isinstance(self._socket, ssl.SSLSocket):
            buffer = memoryview(bytearray(BLOCK_BYTES))
            for block in blocks(source, None, on_bytes, BLOCK_BYTES, lambda: buffer):
                self._send_chunk(block)
        else:
            self._send_file_chunks(source, on_bytes)
        self._socket.sendall(CHUNK_HEADER.pack(0))

    def _send_chunk(self, block: memoryview) -> None:
        self._check_unanswered()
        self._socket.sendall(CHUNK_HEADER.pack(len(block)))
        self._socket.sendall(block)

    def _send_file_chunks(self, source: Path, on_bytes: OnBytes | None) -> None:
        """Without copying the file to this process's memory."""
        with source.open("rb", buffering=0) as file:
            start, size_bytes = 0, os.fstat(file.fileno()).st_size
            while start < size_bytes:
                self._check_unanswered()
                count = min(BLOCK_BYTES, size_bytes - start)
                self._socket.sendall(CHUNK_HEADER.pack(count))
                sent = self._socket.sendfile(file, start, count)
                if sent != count:
                    raise Unavailable(f"{source} became shorter while it was sent: keep it until report returns.")
                start += count
                if on_bytes is not None:
                    on_bytes(count)
                if start == size_bytes:
                    size_bytes = os.fstat(file.fileno()).st_size  # it may be written to meanwhile

    def _check_unanswered(self) -> None:
        if not self.is_idle:
            raise InterruptedError

    def read_chunks(self, target: memoryview) -> int:
        """Fill the beginning of `target` from the chunks that come; 0 at their end. May be asked until then."""
        if self._chunk_left == 0:
            self._chunk_left = self._next_chunk()
            if self._chunk_left == 0:
                return 0
        count = self._socket.recv_into(target, min(len(target), self._chunk_left))
        if count == 0:
            raise WireError("The peer closed the connection in the middle of a file.")
        self._chunk_left -= count
        return count

    def _next_chunk(self) -> int:
        header = bytearray(CHUNK_HEADER.size)
        self.read_exactly(memoryview(header))
        (size_bytes,) = CHUNK_HEADER.unpack(header)
        if size_bytes > CHUNK_MAX_BYTES:
            raise WireError(f"A chunk of {size_bytes} bytes is announced where {CHUNK_MAX_BYTES} are allowed.")
        return int(size_bytes)

    def send_file(self, fd: int, start: int, length: int) -> None:
        """Send so many bytes of an open file, without frames."""
        with os.fdopen(os.dup(fd), "rb", buffering=0) as file:
            if not isinstance(self._socket, ssl.SSLSocket):
                if length and self._socket.sendfile(file, start, length) != length:
                    raise WireError("The file became shorter while it was sent.")
                return
            file.seek(start)
            buffer = memoryview(bytearray(min(length, BLOCK_BYTES)))
            while length:
                count = file.readinto(buffer[:length])
                if not count:
                    raise WireError("The file became shorter while it was sent.")
                self._socket.sendall(buffer[:count])
                length -= count

    def read_exactly(self, target: memoryview) -> None:
        """Fill all of `target`."""
        while target:
            count = self._socket.recv_into(target)
            if count == 0:
                raise WireError("The peer closed the connection in the middle of a file.")
            target = target[count:]

    def discard(self) -> None:
        """Take what the peer still sends, until it hangs up, so that it can read what it was answered."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR) if not isinstance(self._socket, ssl.SSLSocket) else None
            waste = bytearray(256 * 1024)
            while self._socket.recv_into(waste):
                pass


def dial(host: str, port: int, key: str, *, encrypted: bool | None = None) -> Connection:
    """Connect to a storage server. Raises `Unavailable` where it may work later, `AccessDenied` where it may not.
    `encrypted`: None: by the address."""
    where = format_address(host, port)
    try:
        connected = socket.create_connection((host, port), timeout=HANDSHAKE_TIMEOUT_S)
        try:
            _configure(connected)
            if encrypted is None:
                encrypted = not is_loopback(connected.getpeername()[0])
            fingerprint = ""
            if encrypted:
                connected = client_context().wrap_socket(connected)
                certificate = connected.getpeercert(binary_form=True)
                assert certificate is not None
                fingerprint = fingerprint_of(certificate)
            _introduce(connected, key, fingerprint, where)
        except BaseException:
            connected.close()
            raise
    except (OSError, WireError) as error:
        raise Unavailable(f"The storage server at {where} cannot be reached: {error}.") from error
    return Connection(connected)


def _introduce(connected: socket.socket, key: str, fingerprint: str, where: str) -> None:
    challenge = frames.receive(connected, _challenges, auth.MAX_HANDSHAKE_FRAME_BYTES)
    if challenge is None:
        raise WireError("it hung up")
    proof = auth.prove(challenge, key, fingerprint, Hello())
    frames.send(connected, proof)
    verdict = frames.receive(connected, _verdicts, auth.MAX_HANDSHAKE_FRAME_BYTES)
    if verdict is None:
        raise WireError("it hung up")
    if isinstance(verdict, auth.Rejected):
        raise AccessDenied(f"The storage server at {where} serves another run: {verdict.reason}")
    if not auth.check_accepted(challenge, proof, verdict, key, fingerprint):
        raise AccessDenied(f"What listens at {where} is not the run's storage server.")


def accept(connected: socket.socket, key: str, tls: ssl.SSLContext | None, fingerprint: str) -> Connection | None:
    """The server's side of `dial`; None if the client does not know the key. Raises `OSError` or `WireError`."""
    connected.settimeout(HANDSHAKE_TIMEOUT_S)
    _configure(connected)
    if tls is not None:
        connected = tls.wrap_socket(connected, server_side=True)
    try:
        challenge = auth.make_challenge()
        frames.send(connected, challenge)
        proof = frames.receive(connected, _proofs, auth.MAX_HANDSHAKE_FRAME_BYTES)
        if proof is not None:
            verdict = auth.check_proof(challenge, proof, key, fingerprint)
            frames.send(connected, verdict)
            if isinstance(verdict, auth.Accepted):
                return Connection(connected)
    except BaseException:
        connected.close()
        raise
    connected.close()
    return None


def _configure(connected: socket.socket) -> None:
    options: list[tuple[int, int, Any]] = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PEER_TIMEOUT_S // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PEER_TIMEOUT_S // 6),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PEER_TIMEOUT_S * 1000),
    ]
    for option in options:
        connected.setsockopt(*option)

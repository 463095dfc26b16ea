"""A connection between controller and agent, or control client, and how each end makes and authenticates it.

The controller calls `serve`, an agent `connect`, a control client `connect_client`. A `Channel` decodes only the
messages of its own direction. A peer that sends garbage, too much, another agent's message, or nothing during the
handshake loses its connection and is logged once; nobody else notices. `frames` splits the stream, `auth` authenticates
the peer, `envelope` numbers the messages, `tls` encrypts them where they leave the machine: without TLS neither end
uses an address that is not loopback, since the training function would cross the network in the clear, and could be
replaced on its way.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import WireError
from holdfast.printable import printable
from holdfast.wire import auth
from holdfast.wire.auth import Role
from holdfast.wire.control_messages import ControlReply, ControlRequest
from holdfast.wire.envelope import Envelope, Stamp
from holdfast.wire.frames import MAX_FRAME_BYTES, Decoder, Splitter, encode
from holdfast.wire.messages import PROTOCOL, AgentMessage, ControllerMessage
from holdfast.wire.tls import Identity, client_context, fingerprint_of, server_context

__all__ = [
    "HANDSHAKE_TIMEOUT_S",
    "Channel",
    "OnAgent",
    "OnClient",
    "Server",
    "connect",
    "connect_client",
    "serve",
]

HANDSHAKE_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0
MAX_REQUEST_BYTES = 64 * 1024
"""Of a control client's messages."""
_READ_BYTES = 256 * 1024
_DRAIN_BYTES = 1024 * 1024
_log = logging.getLogger(__name__)

_In = TypeVar("_In")
_agent_messages: Decoder[Envelope[AgentMessage]] = msgspec.msgpack.Decoder(Envelope[AgentMessage])
_controller_messages: Decoder[Envelope[ControllerMessage]] = msgspec.msgpack.Decoder(Envelope[ControllerMessage])
_control_requests: Decoder[Envelope[ControlRequest]] = msgspec.msgpack.Decoder(Envelope[ControlRequest])
_control_replies: Decoder[Envelope[ControlReply]] = msgspec.msgpack.Decoder(Envelope[ControlReply])
_client_handshake: Decoder[auth.Proof] = msgspec.msgpack.Decoder(auth.Proof)
_server_handshake: Decoder[auth.Challenge | auth.Accepted | auth.Rejected] = msgspec.msgpack.Decoder(
    auth.Challenge | auth.Accepted | auth.Rejected
)


class Channel(Generic[_In]):
    """Receives messages of the type `_In`, sends any. Used from one event loop, read by one task."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: Decoder[Any], limit_bytes: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._stamp: Stamp | None = None
        """None during the handshake, whose messages have no envelope."""
        self._splitter = Splitter(limit_bytes)
        self._bodies: deque[bytes] = deque()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._closed = False
        name = writer.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name or "a socket")

    @property
    def agent(self) -> str:
        """The name of the agent, as it was authenticated."""
        assert self._stamp is not None
        return self._stamp.agent

    @property
    def local_host(self) -> str:
        """This side's address on the connection: one at which the peer's network can reach this machine."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send_nowait(self, message: Any, run: str = "") -> None:
        """Queue one message of a run, or of the connection itself; all that one turn of the event loop queued goes out
        together. Dropped when closed."""
        if self._closed:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        enveloped = message if self._stamp is None else self._stamp.wrap(message, run)
        data = encode(enveloped, type(message).__name__)
        self._unsent.append(data)
        self._unsent_bytes += len(data)

    async def send(self, message: Any, run: str = "") -> None:
        """Queue one message, and wait where the peer reads too slowly."""
        self.send_nowait(message, run)
        if self.backlog_bytes > _DRAIN_BYTES:
            await self.drain()

    async def drain(self) -> None:
        """Wait until the peer's side of the pipe has room for what was queued."""
        self._flush()
        try:
            await self._writer.drain()
        except (ConnectionError, ssl.SSLError):
            self._closed = True

    @property
    def backlog_bytes(self) -> int:
        """What was queued and the kernel has not taken yet: how far the peer lags."""
        return self._unsent_bytes + self._writer.transport.get_write_buffer_size()

    async def recv(self) -> Envelope[_In] | None:
        """The next message in its envelope, or None when the connection is over: closed, cut, or given up for
        nonsense."""
        envelope: Envelope[_In] | None = await self._recv()
        return envelope

    async def _recv(self) -> Any:
        """As `recv`; during the handshake the message itself."""
        while not self._bodies:
            if not await self._fill():
                return None
        try:
            found = self._decoder.decode(self._bodies.popleft())
            if self._stamp is not None:
                self._stamp.check(found)
        except DECODE_ERRORS as error:
            self._give_up(f"It sent a message that is none of those expected ({error}).")
            return None
        except WireError as error:
            self._give_up(str(error))
            return None
        return found

    async def close(self) -> None:
        """Send what is queued, then end the connection. Closing twice is fine."""
        self._flush()
        self._closed = True
        self._bodies.clear()
        self._writer.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except (OSError, ssl.SSLError):  # a TimeoutError is an OSError too
            self._writer.transport.abort()

    def abort(self) -> None:
        """End the connection at once, unsent messages included."""
        self._closed = True
        self._bodies.clear()
        self._writer.transport.abort()

    async def _fill(self) -> bool:
        try:
            data = await self._reader.read(_READ_BYTES)
        except (OSError, ssl.SSLError):
            data = b""
        if not data or self._closed:
            self._closed = True
            return False
        try:
            self._bodies.extend(self._splitter.feed(data))
        except WireError as error:
            self._give_up(str(error))
            return False
        return True

    def _flush(self) -> None:
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self._unsent_bytes = 0
            if not self._closed:
                self._writer.write(data)

    def _give_up(self, reason: str) -> None:
        if not self._closed:
            _log.warning("The connection of %s is closed: %s", self.peer, printable(reason))
        self.abort()

    def _upgrade(self, decoder: Decoder[Any], stamp: Stamp, limit_bytes: int) -> None:
        """The peer is authenticated: from here on it may send more, and other messages, in envelopes."""
        self._decoder = decoder
        self._stamp = stamp
        self._splitter.limit_bytes = limit_bytes


OnAgent = Callable[[Channel[AgentMessage]], Awaitable[None]]
"""Serves one agent's connection, which ends when this returns."""

OnClient = Callable[[Channel[ControlRequest]], Awaitable[None]]
"""The same for a control client."""


class Server:
    """Accepts the connections of agents and control clients until it is closed."""

    def __init__(
        self,
        token: str,
        on_agent: OnAgent,
        tls: Identity | None,
        limit_bytes: int,
        on_client: OnClient | None = None,
    ) -> None:
        self._token = token
        self._on_agent = on_agent
        self._on_client = on_client
        self._fingerprint = tls.fingerprint if tls else ""
        self._limit_bytes = limit_bytes
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and end every connection with the tasks that serve them."""
        if self._listener is not None:
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        options = {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S} if context else {}
        self._listener = await asyncio.start_server(self._accept, host, port, start_serving=False, **options)  # type: ignore[arg-type]
        if context is None:
            try:
                for listening in self._listener.sockets:
                    _check_loopback(listening.getsockname()[0], "listen")
            except WireError:
                self._listener.close()
                raise
        await self._listener.start_serving()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that was cancelled before its first step closes nothing itself.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel[Any](reader, writer, _client_handshake, auth.MAX_HANDSHAKE_FRAME_BYTES)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                role = await self._authenticate(channel)
            if role is Role.AGENT:
                await self._on_agent(channel)
            elif role is Role.CONTROL and self._on_client is not None:
                await self._on_client(channel)
        except TimeoutError:
            _log.warning("The connection of %s is closed: it kept silent during the handshake", channel.peer)
        finally:
            await channel.close()

    async def _authenticate(self, channel: Channel[Any]) -> Role | None:
        """What the client has proved to be; None if it is refused."""
        challenge = auth.make_challenge()
        channel.send_nowait(challenge)
        proof = await channel._recv()
        if proof is None:
            return None
        verdict = auth.check_proof(challenge, proof, self._token, self._fingerprint)
        if isinstance(verdict, auth.Rejected):
            _log.warning("The %s at %s is refused: %s", proof.role, channel.peer, verdict.reason)
            await channel.send(verdict)
            return None
        await channel.send(verdict)
        is_agent = proof.role is Role.AGENT
        channel._upgrade(
            _agent_messages if is_agent else _control_requests,
            Stamp(proof.agent),
            self._limit_bytes if is_agent else MAX_REQUEST_BYTES,
        )
        return Role(proof.role)


async def serve(
    host: str,
    port: int,
    token: str,
    on_agent: OnAgent,
    tls: Identity | None = None,
    limit_bytes: int = MAX_FRAME_BYTES,
    on_client: OnClient | None = None,
) -> Server:
    """Listen for agents and control clients; `on_agent` or `on_client` is awaited for each that is authenticated, and
    its connection ends with it."""
    server = Server(token, on_agent, tls, limit_bytes, on_client)
    await server._listen(host, port, server_context(tls) if tls else None)
    return server


async def connect(
    address: str, token: str, tls_fingerprint: str | None = None, limit_bytes: int = MAX_FRAME_BYTES, *, agent: str
) -> Channel[ControllerMessage]:
    """Connect to a controller at `host:port` as the agent of this name. Raises `WireError` with one sentence on why
    not."""
    channel = await _connect(address, token, tls_fingerprint, Role.AGENT, agent)
    channel._upgrade(_controller_messages, Stamp(agent), limit_bytes)
    return channel


async def connect_client(address: str, token: str, tls_fingerprint: str | None = None) -> Channel[ControlReply]:
    """The same as a control client."""
    channel = await _connect(address, token, tls_fingerprint, Role.CONTROL)
    channel._upgrade(_control_replies, Stamp(""), MAX_FRAME_BYTES)
    return channel


async def _connect(address: str, token: str, tls_fingerprint: str | None, role: Role, agent: str = "") -> Channel[Any]:
    """Connect, and authenticate both ends."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise WireError(f"The controller's address {address!r} is not of the form host:port.")
    context = client_context() if tls_fingerprint else None
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            reader, writer = await _open(host.strip("[]"), int(port), context)
            channel = Channel[Any](reader, writer, _server_handshake, auth.MAX_HANDSHAKE_FRAME_BYTES)
            try:
                _check_fingerprint(writer, tls_fingerprint)
                await _introduce(channel, token, tls_fingerprint or "", agent, role)
            except BaseException:
                channel.abort()
                raise
    except TimeoutError:
        raise WireError(f"The controller at {address} did not answer within {HANDSHAKE_TIMEOUT_S:g} s.") from None
    except (OSError, ssl.SSLError) as error:
        raise WireError(f"The controller at {address} cannot be reached: {error}.") from error
    return channel


async def _open(
    host: str, port: int, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address of `host` that answers; without TLS only if all of them are loopback."""
    addresses = await _addresses(host, port)
    if context is None:
        for address in addresses:
            _check_loopback(address, "connect")
    for address in addresses[:-1]:
        try:
            return await asyncio.open_connection(address, port, ssl=context)
        except ConnectionRefusedError:
            continue
    return await asyncio.open_connection(addresses[-1], port, ssl=context)


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses that a host name stands for; an address stands for itself, without asking anybody."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(one[4][0]) for one in found))


def _check_loopback(address: str, what: str) -> None:
    """Raise `WireError` unless the address never leaves this machine."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if not found.is_loopback:
        raise WireError(
            f"Refusing to {what} at {address} without TLS, since the training function and its data would cross the "
            "network in the clear: use TLS (--tls-fingerprint, as the run gave it out), or 127.0.0.1 on one machine."
        )


def _check_fingerprint(writer: asyncio.StreamWriter, expected: str | None) -> None:
    if expected is None:
        return
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if fingerprint_of(certificate) != expected.lower():
        raise WireError(
            "The controller's certificate is not the one whose fingerprint was given: someone else answers there."
        )


async def _introduce(channel: Channel[Any], token: str, fingerprint: str, agent: str, role: Role = Role.AGENT) -> None:
    """Authenticate both ends."""
    challenge = await channel._recv()
    if not isinstance(challenge, auth.Challenge):
        raise WireError("The controller hung up before the handshake: it may want TLS, or be no controller at all.")
    proof = auth.prove(challenge, token, fingerprint, agent, role)
    await channel.send(proof)
    answer = await channel._recv()
    if isinstance(answer, auth.Rejected):
        raise WireError(answer.reason)
    if not isinstance(answer, auth.Accepted):
        raise WireError(f"The controller hung up during the handshake (this side speaks protocol {PROTOCOL}).")
    if not auth.check_accepted(challenge, proof, answer, token, fingerprint):
        raise WireError(f"The controller does not know this {role}'s token: it is not the run that was meant.")

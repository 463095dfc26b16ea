"""A connection between controller and agent, or control client, and how each end makes and authenticates it.

The controller calls `serve`, an agent `connect`, a control client `connect_client`. A `Channel` decodes only the
messages of its own direction. A peer that sends garbage, too much, another agent's message, or nothing during the
handshake loses its connection and is logged once; nobody else notices. `socket_transport` moves the bytes, `frames`
splits them, `auth` authenticates the peer, `resumable_channel` makes several connections of an agent one channel. A
connection over loopback is plain, any other is encrypted (`tls`), since the training function would cross the network
in the clear, and could be replaced on its way. Both ends see which it is by their own address, so that nothing has to
be agreed upon, and a tunnel that ends on loopback works.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import HungUp, Unreachable, WireError
from holdfast.printable import printable
from holdfast.wire import auth
from holdfast.wire.control_messages import ControlReply, ControlRequest
from holdfast.wire.envelope import Envelope, Stamp
from holdfast.wire.frames import MAX_FRAME_BYTES, Decoder, Splitter, encode
from holdfast.wire.hello import Hello, Role, find_incompatibility
from holdfast.wire.join_string import is_loopback, parse_address
from holdfast.wire.messages import PROTOCOL, AgentMessage, ControllerMessage
from holdfast.wire.socket_transport import SocketListener, SocketTransport, Transport, dial, listen
from holdfast.wire.stranger_log import StrangerLog
from holdfast.wire.tls import client_context, fingerprint_of, make_identity, server_context

__all__ = [
    "HANDSHAKE_TIMEOUT_S",
    "Channel",
    "CheckHello",
    "OnAgent",
    "OnClient",
    "Server",
    "connect",
    "connect_client",
    "serve",
]

HANDSHAKE_TIMEOUT_S = 5.0
_HANDSHAKES_MAX = 512
"""So many connections at most have not authenticated yet: beyond that the oldest goes, for an honest one takes
milliseconds, unless hundreds of agents start at once."""
_HANDSHAKES_SHARE = 4
"""They may have no more than one of so many files that this process may open."""
_CLOSE_TIMEOUT_S = 2.0
MAX_REQUEST_BYTES = 64 * 1024
"""Of a control client's messages."""
_READ_AHEAD_BYTES = 256 * 1024
"""Nothing is read from the connection while so much waits for `recv`."""
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
_hello: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


class Channel(Generic[_In]):
    """Receives messages of the type `_In`, sends any. Used from one event loop, read by one task."""

    def __init__(self, transport: Transport, decoder: Decoder[Any], limit_bytes: int) -> None:
        self._transport = transport
        self._decoder = decoder
        self._stamp: Stamp | None = None
        """None during the handshake, whose messages have no envelope."""
        self._splitter = Splitter(limit_bytes)
        self._is_paused = False
        """Nothing is read from the connection, since nobody takes what has arrived."""
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self.received_bytes = 0
        """Of all messages that `recv` has given out."""
        self._closed = False
        self._is_lost = False
        self._changed: asyncio.Future[None] | None = None
        """Of whoever waits in `recv`: done when something has arrived, or nothing more will."""
        self._sent: asyncio.Future[None] | None = None
        """Of whoever waits until all is sent."""
        self.strangers: StrangerLog | None = None
        """Where a server logs what peers do during the handshake."""
        self.peer_host, self.peer = transport.peer_host, transport.peer
        transport.start(self)

    @property
    def agent(self) -> str:
        """The name of the agent, as it was authenticated."""
        assert self._stamp is not None
        return self._stamp.agent

    @property
    def local_host(self) -> str:
        """This side's address on the connection: one at which the peer's network can reach this machine."""
        return self._transport.local_host

    @property
    def is_closed_by_peer(self) -> bool:
        """Whether the connection is over because the peer, or the kernel after the peer's death, has closed it."""
        return self._transport.is_closed_by_peer

    # ------------------------------------------------------------ sending

    def send_nowait(self, message: Any, run: str = "") -> None:
        """Queue one message of a run, or of the connection itself, without a number. Dropped when closed."""
        enveloped = message if self._stamp is None else self._stamp.wrap(message, run)
        self.write_frame(encode(enveloped, type(message).__name__))

    def write_frame(self, frame: bytes) -> None:
        """Queue a message that is encoded already; all that one turn of the event loop queued goes out together.
        Dropped when closed."""
        if self._closed:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)

    async def send(self, message: Any, run: str = "") -> None:
        """Queue one message, and wait where the peer reads too slowly."""
        self.send_nowait(message, run)
        if self.backlog_bytes > _DRAIN_BYTES:
            await self.drain()

    async def drain(self) -> None:
        """Wait until the kernel has taken what was queued, or the connection is over."""
        self._flush()
        while self._transport.backlog_bytes and not self._is_lost:
            await self._until_sent()

    async def _until_sent(self) -> None:
        if self._sent is None:
            self._sent = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._sent)

    @property
    def backlog_bytes(self) -> int:
        """What was queued and the kernel has not taken yet: how far the peer lags."""
        return self._unsent_bytes + self._transport.backlog_bytes

    def _flush(self) -> None:
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self._unsent_bytes = 0
            if not self._closed:
                self._transport.write(data)

    # ------------------------------------------------------------ receiving

    async def recv(self) -> Envelope[_In] | None:
        """The next message in its envelope, or None when the connection is over: closed, cut, or given up for
        nonsense."""
        envelope: Envelope[_In] | None = await self._recv()
        return envelope

    async def _recv(self) -> Any:
        """As `recv`; during the handshake the message itself."""
        try:
            while (body := self._splitter.next()) is None:
                if self._closed or self._is_lost:
                    self._closed = True
                    return None
                if self._is_paused:
                    self._is_paused = False
                    self._transport.resume_reading()
                self._changed = asyncio.get_running_loop().create_future()
                await self._changed
            self.received_bytes += len(body)
            found = self._decoder.decode(body)
            if self._stamp is not None:
                self._stamp.check(found)
        except DECODE_ERRORS as error:
            self.give_up(f"It sent a message that is none of those expected ({error}).")
            return None
        except WireError as error:
            self.give_up(str(error))
            return None
        return found

    # ------------------------------------------------------------ what the transport tells

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        self._splitter.append(data)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        elif self._splitter.pending_bytes > _READ_AHEAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def all_sent(self) -> None:
        _wake(self._sent)
        self._sent = None

    def connection_lost(self) -> None:
        self._is_lost = True
        _wake(self._changed)
        self.all_sent()

    # ------------------------------------------------------------ the end

    async def close(self) -> None:
        """Send what is queued, then end the connection. Closing twice is fine."""
        self._flush()
        self._forget()
        self._transport.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                while not self._is_lost:
                    await self._until_sent()
        except TimeoutError:
            self._transport.abort()

    def abort(self) -> None:
        """End the connection at once, unsent messages included."""
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self._closed = True
        self._splitter.clear()
        _wake(self._changed)

    def give_up(self, reason: str) -> None:
        """End the connection at once for what the peer did, and log why."""
        if not self._closed:
            if self._stamp is None and self.strangers is not None:
                self.strangers.warn(self.peer, "nonsense", f"The connection of {self.peer} is closed: {reason}")
            else:
                _log.warning("The connection of %s is closed: %s", self.peer, printable(reason))
        self.abort()

    def _upgrade(self, decoder: Decoder[Any], stamp: Stamp, limit_bytes: int) -> None:
        """The peer is authenticated: from here on it may send more, and other messages, in envelopes."""
        self._decoder = decoder
        self._stamp = stamp
        self._splitter.limit_bytes = limit_bytes


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


def _handshakes_max() -> int:
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files_max == resource.RLIM_INFINITY:
        return _HANDSHAKES_MAX
    return min(_HANDSHAKES_MAX, files_max // _HANDSHAKES_SHARE)


OnAgent = Callable[[Channel[AgentMessage]], Awaitable[None]]
"""Serves one agent's connection, which ends when this returns."""

OnClient = Callable[[Channel[ControlRequest]], Awaitable[None]]
"""The same for a control client."""

CheckHello = Callable[[Hello, str], str | None]
"""From what an agent that knows the secret says of itself, and the address that it dials from, to a sentence on why it
is refused nevertheless; None if it is not."""


class Server:
    """Accepts the connections of agents and control clients until it is closed."""

    def __init__(
        self,
        secret: str,
        on_agent: OnAgent,
        limit_bytes: int = MAX_FRAME_BYTES,
        on_client: OnClient | None = None,
        check_hello: CheckHello | None = None,
    ) -> None:
        self._secret = secret
        self._on_agent = on_agent
        self.on_client = on_client
        """None: control clients are not served."""
        self._limit_bytes = limit_bytes
        self._check_hello = check_hello
        self._fingerprint = ""
        self._tls: ssl.SSLContext | None = None
        self._listener: SocketListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._handshakes: dict[Transport, None] = {}
        """Connections that have not authenticated, the oldest first."""
        self._handshakes_max = _handshakes_max()
        self._strangers = StrangerLog()

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.addresses[0][1])

    async def close(self) -> None:
        """Stop listening, and end every connection with the tasks that serve them."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, host: str, port: int) -> None:
        self._listener = await listen(host, port, self._accept)
        try:
            if not all(is_loopback(address[0]) for address in self._listener.addresses):
                identity = await asyncio.to_thread(make_identity)
                self._fingerprint = identity.fingerprint
                self._tls = server_context(identity)
        except BaseException:
            self._listener.close()
            raise
        self._listener.start()

    def _accept(self, transport: Transport) -> None:
        if self._closed:
            transport.abort()
            return
        self._handshakes[transport] = None
        if len(self._handshakes) > self._handshakes_max:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.abort()
            text = f"Too many connections that say nothing, the last one of {transport.peer_host}."
            self._strangers.warn(transport.peer, "many", text)
        task = asyncio.get_running_loop().create_task(self._serve(transport))
        self._tasks.add(task)
        task.add_done_callback(partial(self._served, transport))

    def _served(self, transport: Transport, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._handshakes.pop(transport, None)
        transport.abort()  # a task that was cancelled before its first step closes nothing itself

    async def _serve(self, transport: Transport) -> None:
        channel: Channel[Any] | None = None
        peer = transport.peer
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                fingerprint = ""
                if self._tls is not None and not is_loopback(transport.local_host):
                    if not await self._start_tls(transport, self._tls):
                        return
                    fingerprint = self._fingerprint
                channel = Channel(transport, _client_handshake, auth.MAX_HANDSHAKE_FRAME_BYTES)
                channel.strangers = self._strangers
                role = await self._authenticate(channel, fingerprint)
            self._handshakes.pop(transport, None)
            if role is Role.AGENT:
                await self._on_agent(channel)
            elif role is Role.CONTROL and self.on_client is not None:
                await self.on_client(channel)
        except TimeoutError:
            self._strangers.warn(
                peer, "silent", f"The connection of {peer} is closed: it kept silent during the handshake"
            )
        finally:
            if channel is not None:
                await channel.close()

    async def _start_tls(self, transport: Transport, context: ssl.SSLContext) -> bool:
        """Whether the connection is encrypted now."""
        assert isinstance(transport, SocketTransport)
        try:
            await transport.start_tls(context, server_side=True)
        except TimeoutError:
            raise
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                text = f"The connection of {transport.peer} is closed: it does not speak TLS ({error})"
                self._strangers.warn(transport.peer, "tls", text)
            return False
        return True

    async def _authenticate(self, channel: Channel[Any], fingerprint: str) -> Role | None:
        """What the client has proved to be; None if it is refused."""
        challenge = auth.make_challenge()
        channel.send_nowait(challenge)
        proof = await channel._recv()
        if proof is None:
            return None
        verdict = auth.check_proof(challenge, proof, self._secret, fingerprint)
        hello = None
        if isinstance(verdict, auth.Accepted):
            hello, problem = self._read_hello(proof, channel.peer_host)
            if problem is not None:
                verdict = auth.Rejected(reason=problem)
        if isinstance(verdict, auth.Rejected):
            self._strangers.warn(
                channel.peer, verdict.reason[:20], f"The client at {channel.peer} is refused: {verdict.reason}"
            )
            await channel.send(verdict)
            return None
        await channel.send(verdict)
        assert hello is not None
        if hello.role is Role.AGENT:
            channel._upgrade(_agent_messages, Stamp(hello.agent), self._limit_bytes)
        else:
            channel._upgrade(_control_requests, Stamp(hello.agent), MAX_REQUEST_BYTES)
        return hello.role

    def _read_hello(self, proof: auth.Proof, peer: str) -> tuple[Hello | None, str | None]:
        """The hello of a client that knows the secret, or why it is refused."""
        try:
            hello = _hello.decode(proof.hello)
        except DECODE_ERRORS as error:
            return None, f"The client introduced itself in a way that is not understood ({error})."
        problem = find_incompatibility(hello)
        if problem is None and self._check_hello is not None and hello.role is Role.AGENT:
            problem = self._check_hello(hello, peer)
        return hello, problem


async def serve(
    host: str,
    port: int,
    secret: str,
    on_agent: OnAgent,
    limit_bytes: int = MAX_FRAME_BYTES,
    on_client: OnClient | None = None,
    check_hello: CheckHello | None = None,
) -> Server:
    """Listen for agents and control clients; `on_agent` or `on_client` is awaited for each that is authenticated, and
    its connection ends with it."""
    server = Server(secret, on_agent, limit_bytes, on_client, check_hello)
    await server._listen(host, port)
    return server


async def connect(
    address: str, secret: str, hello: Hello, limit_bytes: int = MAX_FRAME_BYTES
) -> Channel[ControllerMessage]:
    """Connect to a controller at `host:port` as this agent. Raises `WireError` with one sentence on why not,
    `Unreachable` where it may work later, `HungUp` where it may work soon."""
    channel = await _connect(address, secret, hello)
    channel._upgrade(_controller_messages, Stamp(hello.agent), limit_bytes)
    return channel


async def connect_client(address: str, secret: str) -> Channel[ControlReply]:
    """The same as a control client."""
    channel = await _connect(address, secret, Hello(role=Role.CONTROL))
    channel._upgrade(_control_replies, Stamp(""), MAX_FRAME_BYTES)
    return channel


async def _connect(address: str, secret: str, hello: Hello) -> Channel[Any]:
    """Connect, and authenticate both ends."""
    host, port = parse_address(address, "The controller's address")
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            transport, fingerprint = await _open(host, port)
            channel: Channel[Any] = Channel(transport, _server_handshake, auth.MAX_HANDSHAKE_FRAME_BYTES)
            try:
                await _introduce(channel, secret, fingerprint, hello)
            except BaseException:
                channel.abort()
                raise
    except TimeoutError:
        raise Unreachable(f"The controller at {address} did not answer within {HANDSHAKE_TIMEOUT_S:g} s.") from None
    except OSError as error:
        raise Unreachable(f"The controller at {address} cannot be reached: {error}.") from error
    return channel


async def _open(host: str, port: int) -> tuple[SocketTransport, str]:
    """Connect to the first address of `host` that answers, and the fingerprint of its certificate; "" on loopback,
    where there is none."""
    addresses = await _addresses(host, port)
    for address in addresses:
        try:
            transport = await dial(address, port)
        except ConnectionRefusedError:
            if address == addresses[-1]:
                raise
            continue
        break
    if is_loopback(address):
        return transport, ""
    try:
        await transport.start_tls(client_context(), server_side=False)
        return transport, fingerprint_of(transport.peer_certificate)
    except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        transport.abort()
        raise HungUp(f"The controller at {host}:{port} hung up before the handshake: {error}.") from error
    except BaseException:
        transport.abort()
        raise


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses that a host name stands for; an address stands for itself, without asking anybody."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(one[4][0]) for one in found))


async def _introduce(channel: Channel[Any], secret: str, fingerprint: str, hello: Hello) -> None:
    """Authenticate both ends."""
    challenge = await channel._recv()
    if not isinstance(challenge, auth.Challenge):
        raise HungUp(
            "The controller hung up before the handshake: something else listens there, or it has too many connections."
        )
    proof = auth.prove(challenge, secret, fingerprint, hello)
    await channel.send(proof)
    answer = await channel._recv()
    if isinstance(answer, auth.Rejected):
        raise WireError(answer.reason)
    if not isinstance(answer, auth.Accepted):
        raise HungUp(f"The controller hung up during the handshake (this side speaks protocol {PROTOCOL}).")
    if not auth.check_accepted(challenge, proof, answer, secret, fingerprint):
        raise WireError("The controller does not know the run secret: something else listens there, or stands between.")

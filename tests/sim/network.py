"""Connections between simulated processes: streams of bytes under the real `wire.channel`.

A connection is an ordered stream in each direction, with delays. It may be cut: nothing arrives any more, and neither
side is told; or what was sent arrives late, when the agent has connected again already. When a process ends, the kernel
closes its side, and the other reads the end of the stream; what was still on its way arrives before that, or is lost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.sim.process import Process

from holdfast.engines.engine import ControllerEndpoint
from holdfast.errors import WireError
from holdfast.wire import auth
from holdfast.wire.channel import HANDSHAKE_TIMEOUT_S, Channel, OnAgent, Server
from holdfast.wire.channel import _controller_messages as controller_messages
from holdfast.wire.channel import _introduce as introduce
from holdfast.wire.channel import _server_handshake as server_handshake
from holdfast.wire.envelope import Stamp
from holdfast.wire.frames import MAX_FRAME_BYTES
from holdfast.wire.hello import Hello
from holdfast.wire.messages import ControllerMessage
from holdfast.wire.socket_transport import Receiver

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

__all__ = ["Connection", "Listener", "connect"]


class Listener(Server):
    """The controller's real server, but for the socket."""

    def __init__(self, process: Process, secret: str, on_agent: OnAgent) -> None:
        super().__init__(secret, on_agent)
        self.process = process
        self._port = process.sim.add_listener(self)

    @property
    def port(self) -> int:
        return self._port

    def connected(self, end: _End) -> None:
        """A connection has arrived."""
        self._accept(end)


class Connection:
    """A TCP connection."""

    def __init__(self, client: Process, server: Process) -> None:
        self.sim: Simulation = client.sim
        self.is_cut = False
        self._late_until = 0.0
        self.client, self.server = _End(self, client), _End(self, server)
        self.client.connect_to(self.server)
        self.server.connect_to(self.client)

    @property
    def is_open(self) -> bool:
        return not (self.is_cut or self.client._closed or self.server._closed)

    def cut(self) -> None:
        self.is_cut = True

    def delay(self, seconds: float) -> None:
        """Nothing arrives before that."""
        self._late_until = self.sim.loop.time() + seconds

    def hold_s(self) -> float:
        """For how long what arrives now is held back."""
        return max(0.0, self._late_until - self.sim.loop.time())


class _End:
    """One side: the `Transport` of a `Channel`."""

    def __init__(self, connection: Connection, process: Process) -> None:
        self._connection, self.process = connection, process
        self._loop = connection.sim.loop
        self._other: _End = self
        self._receiver: Receiver | None = None
        self._early: list[bytes] = []
        """What arrived before anybody received."""
        self._closed = False
        self.is_closed_by_peer = False
        self._is_lost = False
        """The channel of this side was told that the connection is over."""
        self._arrives_at = 0.0
        """When what was last sent arrives."""
        self._lost_after = float("inf")
        """What would arrive later than this is lost: the process died."""
        process.on_death.append(self._died)

    def connect_to(self, other: _End) -> None:
        self._other = other
        self.peer_host, self.peer = other.process.host, f"{other.process.host}:1"

    @property
    def local_host(self) -> str:
        return self.process.host

    @property
    def backlog_bytes(self) -> int:
        return 0  # the peer always has room

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._early:
            receiver.data_received(b"".join(self._early))
        if self._is_lost:
            receiver.connection_lost()

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._send(data)

    def pause_reading(self) -> None:
        """Whoever reads takes it all."""

    resume_reading = pause_reading

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._send(b"")
            self.lose()

    abort = close

    def lose(self) -> None:
        """This side learns that the connection is over, and sends nothing more, not even that it closes it."""
        self._closed = self._is_lost = True
        if self._receiver is not None:
            self._receiver.connection_lost()

    def _send(self, data: bytes) -> None:
        sim = self._connection.sim
        self._arrives_at = max(self._arrives_at, self._loop.time() + sim.delay_s(sim.scenario.message_s))
        self._loop.call_at(self._arrives_at, self._arrive, self._arrives_at, data, context=sim.network)

    def _arrive(self, at: float, data: bytes) -> None:
        peer = self._other
        if self._connection.is_cut or peer._closed or (data and at > self._lost_after):
            return
        if hold_s := self._connection.hold_s():
            self._loop.call_later(hold_s, self._arrive, at, data, context=self._connection.sim.network)
            return
        if not data:
            peer.is_closed_by_peer = True
            peer.lose()
        elif peer._receiver is None:
            peer._early.append(data)
        elif not peer._is_lost:
            peer._receiver.data_received(data)

    def _died(self) -> None:
        if not self._closed:
            self._closed = True
            self._lost_after = self._connection.sim.random.choice([self._loop.time(), float("inf")])
            self._send(b"")


async def connect(process: Process, endpoint: ControllerEndpoint) -> tuple[Channel[ControllerMessage], Connection]:
    """Dial a controller, as `wire.channel.connect` does."""
    sim = process.sim
    listener = sim.listeners.get(endpoint.address)
    if listener is None or not listener.process.is_alive:
        raise WireError(f"The controller at {endpoint.address} cannot be reached.")
    connection = Connection(process, listener.process)
    await asyncio.sleep(sim.delay_s(sim.scenario.message_s))
    listener.process.call(listener.connected, connection.server)
    end = connection.client
    channel = Channel[Any](end, server_handshake, auth.MAX_HANDSHAKE_FRAME_BYTES)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await introduce(channel, endpoint.secret, "", Hello(agent=process.name))
    except TimeoutError:
        channel.abort()
        raise WireError("The controller did not answer.") from None
    channel._upgrade(controller_messages, Stamp(process.name), MAX_FRAME_BYTES)
    return channel, connection

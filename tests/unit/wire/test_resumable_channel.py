"""A channel over connections that break at any byte: every message arrives once, in order, and is kept no longer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.core.events import AgentPrepared
from holdfast.errors import WireError
from holdfast.wire import resumable_channel
from holdfast.wire.channel import Channel, connect, serve
from holdfast.wire.hello import Hello
from holdfast.wire.messages import AgentMessage, Collected, ControllerMessage, Ping, Pong
from holdfast.wire.resumable_channel import ChannelRefusedError, ResumableChannel, read_opening, refuse

_SECRET = "correct horse"


class _Controller:
    """Accepts any number of connections of one agent, and keeps what it sent."""

    def __init__(self) -> None:
        self.channel = ResumableChannel[AgentMessage]("a", "1", comes_back=True)
        self.got: list[str | None] = []
        self.changed = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.server: Any = None

    async def serve(self, connection: Channel[AgentMessage]) -> None:
        opening = await read_opening(connection)
        assert opening is not None
        if not self.channel.can_resume(opening.received or 0):
            await refuse(connection, "It is too late.")
            return
        self.channel.accept(connection, opening, 30.0)
        while (envelope := await self.channel.recv()) is not None:
            if isinstance(envelope.message, AgentPrepared):
                self.got.append(envelope.message.cold_reason)
            self.changed.set()
            await self.reads.wait()

    async def connect(self) -> Channel[ControllerMessage]:
        return await connect(f"127.0.0.1:{self.server.port}", _SECRET, Hello(agent="a"))

    async def expect(self, count: int) -> None:
        while len(self.got) < count:
            self.changed.clear()
            await self.changed.wait()


class _Agent:
    """The other end, which reads in a task of its own."""

    def __init__(self, controller: _Controller) -> None:
        self.channel = ResumableChannel[ControllerMessage]("a", "1", comes_back=True)
        self._controller = controller
        self.got: list[int] = []
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is over."""
        while True:
            try:
                await self.channel.join(await self._controller.connect())
            except WireError:
                continue
            while (envelope := await self.channel.recv()) is not None:
                if isinstance(envelope.message, Collected):
                    self.got.append(envelope.message.sequence)
                self.changed.set()

    async def expect(self, count: int) -> None:
        while len(self.got) < count:
            self.changed.clear()
            await self.changed.wait()


def _run(test: Callable[[_Controller, _Agent], Awaitable[None]]) -> None:
    async def bounded() -> None:
        controller = _Controller()
        controller.server = await serve("127.0.0.1", 0, _SECRET, controller.serve)
        agent = _Agent(controller)
        running = asyncio.ensure_future(agent.run())
        try:
            async with asyncio.timeout(60):
                await test(controller, agent)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            agent.channel.abort()
            await controller.server.close()

    asyncio.run(bounded())


def _report(number: int) -> AgentPrepared:
    return AgentPrepared(agent="a", cold_reason=str(number))


@pytest.mark.parametrize("seed", range(20))
def test_every_message_arrives_once_and_in_order_whenever_connections_break(seed: int) -> None:
    chance = random.Random(seed)

    async def test(controller: _Controller, agent: _Agent) -> None:
        for number in range(60):
            agent.channel.send_nowait(_report(number))
            controller.channel.send_nowait(Collected(generation=1, sequence=number))
            for _ in range(chance.choice([0, 0, 1, 3, 10])):
                await asyncio.sleep(0)
            if chance.random() < 0.2:
                chance.choice([agent.channel.disconnect, controller.channel.disconnect])()
        await asyncio.gather(controller.expect(60), agent.expect(60))
        assert controller.got == [str(number) for number in range(60)]
        assert agent.got == list(range(60))

    _run(test)


def test_what_is_acknowledged_is_not_kept() -> None:
    """By pings where nothing else is sent, and by acknowledgements where much is received and nothing is sent."""

    async def test(controller: _Controller, agent: _Agent) -> None:
        agent.channel.send_nowait(_report(1))
        await controller.expect(1)
        assert agent.channel.backlog_bytes > 0
        while agent.channel.backlog_bytes:
            controller.channel.signal(Ping())
            await asyncio.sleep(0.001)
        for number in range(3 * resumable_channel._ACKNOWLEDGE_BYTES // 1000):
            agent.channel.send_nowait(AgentPrepared(agent="a", cold_reason=f"{number:01000}"))
        await agent.channel.drain(resumable_channel._ACKNOWLEDGE_BYTES)
        assert agent.channel.backlog_bytes <= resumable_channel._ACKNOWLEDGE_BYTES

    _run(test)


def test_a_sender_waits_for_a_peer_that_does_not_read() -> None:
    async def test(controller: _Controller, agent: _Agent) -> None:
        agent.channel.send_nowait(_report(0))
        controller.reads.clear()
        text = "x" * 100_000

        async def send() -> None:
            for _ in range(100):
                await agent.channel.send(AgentPrepared(agent="a", cold_reason=text))

        sending = asyncio.ensure_future(send())
        while agent.channel.backlog_bytes <= resumable_channel._WINDOW_BYTES:
            await asyncio.sleep(0)
        assert not sending.done() and agent.channel.backlog_bytes < resumable_channel._WINDOW_BYTES + 200_000
        controller.reads.set()
        await sending
        await controller.expect(101)

    _run(test)


def test_messages_about_the_connection_are_lost_with_it() -> None:
    async def test(controller: _Controller, agent: _Agent) -> None:
        agent.channel.send_nowait(_report(1))
        await controller.expect(1)
        agent.channel.disconnect()
        agent.channel.signal(Pong())
        agent.channel.send_nowait(_report(2))
        await controller.expect(2)
        assert controller.got == ["1", "2"]

    _run(test)


@pytest.mark.parametrize("received", [0, 3])
def test_a_channel_whose_messages_are_gone_cannot_be_resumed(received: int) -> None:
    """The peer has forgotten some that were acknowledged, or has more than were ever sent."""

    async def test(controller: _Controller, agent: _Agent) -> None:
        controller.channel.send_nowait(Collected(generation=1, sequence=1))
        controller.channel.send_nowait(Collected(generation=1, sequence=2))
        await agent.expect(2)
        agent.channel.send_nowait(_report(1))
        await controller.expect(1)
        other = ResumableChannel[ControllerMessage]("a", "1")
        other._sent, other._received = 1, received
        with pytest.raises(ChannelRefusedError, match=r"It is too late\."):
            await other.join(await controller.connect())

    _run(test)


def test_a_message_that_is_not_the_next_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def test(controller: _Controller, agent: _Agent) -> None:
        agent.channel.send_nowait(_report(1))
        await controller.expect(1)
        connection = agent.channel._channel
        agent.channel._sent += 1  # one is lost
        agent.channel._unacknowledged.append((agent.channel._sent, b""))
        agent.channel.send_nowait(_report(3))
        while agent.channel._channel is connection:
            await asyncio.sleep(0.001)

    _run(test)
    assert [one for one in caplog.messages if "message 3 where message 2 comes next" in one]

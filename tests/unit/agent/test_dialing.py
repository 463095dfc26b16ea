"""How agents dial when a controller has too many of them at once: real agents, a real server."""

from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path

import pytest
from tests.faults.agent_harness import open_channel

from holdfast.agent.agent import Agent
from holdfast.agent.inline import InlineSpawners
from holdfast.agent.platform import Platform
from holdfast.core.events import AgentJoined
from holdfast.errors import Unreachable
from holdfast.storage.run_secret import make_secret
from holdfast.wire import channel
from holdfast.wire.channel import Channel, serve
from holdfast.wire.messages import AgentMessage, Shutdown
from holdfast.worker.job import Job


def _agent(name: str, port: int, secret: str, tmp_path: Path) -> Agent:
    job = Job(lambda: None, None, False, None)
    spawners = InlineSpawners(job, lambda call: None)
    return Agent(name, 1, Platform(f"127.0.0.1:{port}", secret, root=tmp_path / "cache", spawners=spawners))


@pytest.mark.parametrize("tls", [False, True])
def test_agents_that_are_cut_since_too_many_dial_dial_again(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKES_MAX", 8)
    if tls:
        monkeypatch.setattr(channel, "is_loopback", lambda address: False)
    joined: list[str] = []

    async def controller(connection: Channel[AgentMessage]) -> None:
        opened = await open_channel(connection)
        while (envelope := await opened.recv()) is not None:
            if isinstance(envelope.message, AgentJoined):
                joined.append(connection.agent)
                opened.send_nowait(Shutdown(flush_s=0.0))

    async def run() -> None:
        secret = make_secret()
        server = await serve("127.0.0.1", 0, secret, controller)
        agents = [_agent(f"a{number}", server.port, secret, tmp_path) for number in range(40)]
        await asyncio.wait_for(asyncio.gather(*(agent.run() for agent in agents)), 60)
        await server.close()

    asyncio.run(run())
    assert sorted(joined) == sorted(f"a{number}" for number in range(40))
    assert "Too many connections" in caplog.text, "none was cut"


def test_an_agent_whose_controller_is_not_there_does_not_dial_again(tmp_path: Path) -> None:
    async def run() -> None:
        server = await serve("127.0.0.1", 0, "secret", lambda channel: channel.close())
        port = server.port
        await server.close()
        with pytest.raises(Unreachable):
            await asyncio.wait_for(_agent("a", port, "secret", tmp_path).run(), 60)

    asyncio.run(run())


def test_an_agent_that_joins_says_which_torch_it_has(tmp_path: Path) -> None:
    said: list[AgentJoined] = []

    async def controller(connection: Channel[AgentMessage]) -> None:
        opened = await open_channel(connection)
        while (envelope := await opened.recv()) is not None:
            if isinstance(envelope.message, AgentJoined):
                said.append(envelope.message)
                opened.send_nowait(Shutdown(flush_s=0.0))

    async def run() -> None:
        secret = make_secret()
        server = await serve("127.0.0.1", 0, secret, controller)
        for comes_back in (True, False):
            spawners = InlineSpawners(Job(lambda: None, None, False, None), lambda call: None)
            address = f"127.0.0.1:{server.port}"
            platform = Platform(address, secret, root=tmp_path / "cache", spawners=spawners, comes_back=comes_back)
            await asyncio.wait_for(Agent("a", 1, platform).run(), 60)
        await server.close()

    asyncio.run(run())
    assert [one.torch for one in said] == [importlib.metadata.version("torch"), None]

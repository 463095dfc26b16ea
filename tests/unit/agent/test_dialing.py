"""How agents dial when a controller has too many of them at once: real agents, a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.faults.agent_harness import open_channel

from holdfast.agent.agent import Agent
from holdfast.agent.inline import InlineSpawners
from holdfast.agent.platform import Platform
from holdfast.core.events import AgentJoined
from holdfast.errors import Unreachable, WireError
from holdfast.storage.run_secret import make_secret
from holdfast.wire import channel
from holdfast.wire.channel import Channel, serve
from holdfast.wire.hello import Hello, installed_torch
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
    async def run() -> None:
        said: list[Hello] = []

        def check(hello: Hello, peer: str) -> str:
            said.append(hello)
            return "That is all."

        server = await serve("127.0.0.1", 0, "secret", lambda channel: channel.close(), check_hello=check)
        platform = Platform(f"127.0.0.1:{server.port}", "secret", root=tmp_path, comes_back=True)
        with pytest.raises(WireError, match="That is all"):
            await platform.connect("a")
        await server.close()
        assert said[0].torch == installed_torch() != ""

    asyncio.run(asyncio.wait_for(run(), 60))

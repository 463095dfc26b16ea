"""Control clients on the controller's port: authenticated as agents are, and allowed nothing but requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from holdfast.errors import WireError
from holdfast.wire import auth
from holdfast.wire.channel import Channel, connect, connect_client, serve
from holdfast.wire.control_messages import ControlRequest, Done, GetStatus, Refused, StopRun
from holdfast.wire.hello import Hello, Role
from holdfast.wire.messages import AgentMessage, Pong

SECRET = "correct horse"


class _Controller:
    """Answers requests, and counts the agents that connect."""

    def __init__(self) -> None:
        self.agents = 0
        self.got: asyncio.Queue[tuple[str, ControlRequest] | None] = asyncio.Queue()

    async def agent(self, channel: Channel[AgentMessage]) -> None:
        self.agents += 1
        await channel.recv()

    async def client(self, channel: Channel[ControlRequest]) -> None:
        while (envelope := await channel.recv()) is not None:
            self.got.put_nowait((envelope.run, envelope.message))
            await channel.send(Done(text="yes"), envelope.run)
        self.got.put_nowait(None)


def _run(test: Callable[[_Controller, str], Awaitable[None]]) -> None:
    async def bounded() -> None:
        controller = _Controller()
        server = await serve("127.0.0.1", 0, SECRET, controller.agent, on_client=controller.client)
        try:
            async with asyncio.timeout(60):
                await test(controller, f"127.0.0.1:{server.port}")
        finally:
            await server.close()

    asyncio.run(bounded())


def test_a_control_client_is_answered_and_is_no_agent() -> None:
    async def test(controller: _Controller, address: str) -> None:
        client = await connect_client(address, SECRET)
        client.send_nowait(StopRun(force=True), "run-1")
        answer = await client.recv()
        assert answer is not None and (answer.run, answer.message) == ("run-1", Done(text="yes"))
        assert await controller.got.get() == ("run-1", StopRun(force=True))
        await client.close()
        assert await controller.got.get() is None
        assert controller.agents == 0

    _run(test)


def test_without_the_run_secret_no_request_is_read(caplog: pytest.LogCaptureFixture) -> None:
    async def test(controller: _Controller, address: str) -> None:
        with pytest.raises(WireError, match="run secret is not the controller's"):
            await connect_client(address, "wrong")
        assert controller.got.empty() and controller.agents == 0

    _run(test)
    assert len(caplog.records) == 1


def test_a_proof_made_for_one_role_is_worth_nothing_for_the_other() -> None:
    challenge = auth.make_challenge()
    proof = auth.prove(challenge, SECRET, "", Hello(agent="a"))
    forged = msgspec.structs.replace(proof, hello=msgspec.msgpack.encode(Hello(agent="a", role=Role.CONTROL)))
    assert isinstance(auth.check_proof(challenge, proof, SECRET, ""), auth.Accepted)
    assert isinstance(auth.check_proof(challenge, forged, SECRET, ""), auth.Rejected)


@pytest.mark.parametrize(
    "message",
    [
        Pong(),
        Refused(reason="a reply"),
        {"type": "ReadLogs", "rank": "../../../etc/passwd"},
        {"type": "DrainNode", "node": "x" * 100_000},
    ],
    ids=["an agent's message", "a reply", "a path instead of a rank", "too large"],
)
def test_anything_but_a_request_closes_the_connection(message: Any) -> None:
    async def test(controller: _Controller, address: str) -> None:
        client = await connect_client(address, SECRET)
        client.send_nowait(message, "run-1")
        assert await client.recv() is None
        assert await controller.got.get() is None
        await client.close()

    _run(test)


def test_an_agent_cannot_send_requests() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await connect(address, SECRET, Hello(agent="a"))
        agent.send_nowait(GetStatus(), "run-1")
        assert await agent.recv() is None
        assert controller.got.empty()
        await agent.close()

    _run(test)

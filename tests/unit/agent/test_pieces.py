"""Pieces of functions and working directories that reach an agent which knows nothing of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.faults.agent_harness import open_channel

from holdfast.agent.agent import Agent
from holdfast.agent.inline import InlineSpawners
from holdfast.agent.platform import Platform
from holdfast.storage.run_secret import make_secret
from holdfast.wire.channel import Channel, serve
from holdfast.wire.messages import AgentMessage, CodePiece, ControllerMessage, FunctionPiece, Ping, Pong, Shutdown
from holdfast.worker.job import Job


@pytest.mark.parametrize("piece", [CodePiece(hash="a", data=b"b"), FunctionPiece(key="a", data=b"b")])
def test_a_piece_of_what_was_not_announced_is_refused_and_ends_nothing(
    piece: ControllerMessage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answered: list[Pong] = []

    async def controller(connection: Channel[AgentMessage]) -> None:
        opened = await open_channel(connection)
        opened.send_nowait(piece)
        opened.send_nowait(Ping())
        while (envelope := await opened.recv()) is not None:
            if isinstance(envelope.message, Pong):
                answered.append(envelope.message)
                opened.send_nowait(Shutdown(flush_s=0.0))

    async def run() -> None:
        secret = make_secret()
        server = await serve("127.0.0.1", 0, secret, controller)
        spawners = InlineSpawners(Job(lambda: None, None, False, None), lambda call: None)
        platform = Platform(f"127.0.0.1:{server.port}", secret, root=tmp_path / "cache", spawners=spawners)
        await asyncio.wait_for(Agent("a", 1, platform).run(), 60)
        await server.close()

    asyncio.run(run())
    assert len(answered) == 1, "the agent went on"
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [
        f"A {type(piece).__name__} is refused: what it belongs to was not announced."
    ]

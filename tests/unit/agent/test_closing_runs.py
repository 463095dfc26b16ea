"""A run that the controller has ended leaves nothing on an agent that lives on, whatever interrupts its end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.faults.agent_harness import open_channel

from holdfast.agent.agent import Agent
from holdfast.agent.buffers import Buffers
from holdfast.agent.inline import InlineSpawners
from holdfast.agent.platform import Platform
from holdfast.agent.run_storage import RunStorage
from holdfast.agent.session_dir import RunDirectory
from holdfast.core.events import AgentPrepared
from holdfast.storage.run_secret import make_secret
from holdfast.wire.channel import Channel, serve
from holdfast.wire.messages import AgentMessage, CloseRun, PrepareFunction, PrepareRun, Shutdown
from holdfast.wire.resumable_channel import ResumableChannel, read_opening, refuse
from holdfast.worker.job import Job


def test_a_controller_that_is_lost_while_a_run_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing its artifacts takes long, and the driver is killed meanwhile."""
    closed: list[str] = []
    is_storing, may_store = threading.Event(), threading.Event()

    def store(_: RunStorage) -> None:
        is_storing.set()
        may_store.wait(60)

    monkeypatch.setattr(RunStorage, "_sync", store)
    for kind, method in ((RunDirectory, "remove"), (Buffers, "close")):
        monkeypatch.setattr(kind, method, lambda _, name=kind.__name__: closed.append(name))
    closed_at_second: list[str] = []
    first: list[ResumableChannel[AgentMessage]] = []

    async def controller(connection: Channel[AgentMessage]) -> None:
        if first:
            opening = await read_opening(connection)
            assert opening is not None
            if opening.received is not None:
                await refuse(connection, "The driver was killed.")
                return
            closed_at_second.extend(closed)
            second = ResumableChannel[AgentMessage](connection.agent, opening.incarnation, comes_back=True)
            second.accept(connection, opening, 30.0)
            second.send_nowait(Shutdown(flush_s=0.0))
            while await second.recv() is not None:
                pass
            return
        opened = await open_channel(connection)
        first.append(opened)
        opened.send_nowait(PrepareFunction(key="f", function=b"", sys_path=[], environment={}))
        order = PrepareRun(
            function_key="f",
            experiment="e",
            trial_id="t",
            storage=str(tmp_path / "run"),
            trial_dir=str(tmp_path / "run"),
            work_dir=str(tmp_path / "work"),
            sync_artifacts=True,
        )
        opened.send_nowait(order, "r")
        while (envelope := await opened.recv()) is not None:
            if isinstance(envelope.message, AgentPrepared):
                opened.send_nowait(CloseRun(flush_s=60.0), "r")
                await asyncio.to_thread(is_storing.wait, 60)
                opened.abort()
                return

    async def run() -> None:
        secret = make_secret()
        server = await serve("127.0.0.1", 0, secret, controller)
        spawners = InlineSpawners(Job(lambda: None, None, False, None), lambda call: None)
        address = f"127.0.0.1:{server.port}"
        platform = Platform(address, secret, root=tmp_path / "cache", spawners=spawners, comes_back=True)
        await asyncio.wait_for(Agent("a", 1, platform).run(), 60)
        may_store.set()
        await server.close()

    asyncio.run(run())
    assert sorted(closed_at_second) == ["Buffers", "RunDirectory"]

"""Local mode: the worker runs in the test's own main thread, the agent in another."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.agent_harness import open_channel

from holdfast import train
from holdfast.agent.agent import Agent
from holdfast.agent.inline import InlineSpawners
from holdfast.agent.platform import Platform
from holdfast.agent.worker_group import WorkerGroup
from holdfast.core.commands import Place, StartWorkers, StopWorkers
from holdfast.core.events import AgentJoined, AgentPrepared, RankReported, WorkerExited, WorkerFinished, WorkersStopped
from holdfast.storage.run_secret import make_secret
from holdfast.wire.channel import Channel, serve
from holdfast.wire.messages import AgentMessage, PrepareFunction, PrepareRun, Shutdown
from holdfast.worker.job import Job


def _run_locally(
    function: Callable[[], Any],
    tmp_path: Path,
    stop_at_report: bool = False,
    read_after: threading.Event | None = None,
) -> list[AgentMessage]:
    """All messages of an embedded agent while it runs `function` in this thread."""
    said: list[AgentMessage] = []
    calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
    prepare = PrepareRun(
        function_key="f",
        storage=str(tmp_path / "run"),
        experiment="exp",
        trial_id="t",
        trial_dir=str(tmp_path / "run"),
        work_dir=str(tmp_path / "work"),
    )

    async def controller(connection: Channel[AgentMessage]) -> None:
        channel = await open_channel(connection)
        while (envelope := await channel.recv()) is not None:
            message = envelope.message
            said.append(message)
            if isinstance(message, AgentJoined):
                channel.send_nowait(PrepareFunction(key="f", function=b"", sys_path=[], environment={}))
                channel.send_nowait(prepare, "run-1")
            elif isinstance(message, AgentPrepared):
                await channel.send(_start(message.master_port), "run-1")
                if read_after is not None:
                    await asyncio.get_running_loop().run_in_executor(None, read_after.wait, 60)
            elif isinstance(message, RankReported) and stop_at_report:
                channel.send_nowait(StopWorkers(generation=1), "run-1")
            elif isinstance(message, WorkerFinished | WorkerExited | WorkersStopped):
                channel.send_nowait(Shutdown())

    async def run() -> None:
        secret = make_secret()
        server = await serve("127.0.0.1", 0, secret, controller)
        platform = Platform(
            f"127.0.0.1:{server.port}",
            secret,
            root=tmp_path / "cache",
            spawners=InlineSpawners(Job(function, None, False, None), calls.put),
        )
        try:
            await asyncio.wait_for(Agent("inline", 1, platform).run(), 60)
        finally:
            await server.close()
            calls.put(None)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    while (call := calls.get()) is not None:
        call()
    thread.join()
    assert list((tmp_path / "cache" / "agents").iterdir()) == []
    return said


def _start(port: int) -> StartWorkers:
    return StartWorkers(
        generation=1,
        world_size=1,
        places=(Place(agent="inline", node_rank=0, ranks=(0,)),),
        node_count=1,
        checkpoint=None,
        iteration=0,
        restart_count=0,
        master_address="127.0.0.1",
        master_port=port,
    )


def test_an_inline_worker_restores_the_process_state(tmp_path: Path) -> None:
    environment, directory = dict(os.environ), Path.cwd()
    marks: list[Any] = []

    def function() -> str:
        train.report({"loss": 1.0})
        marks.append((threading.current_thread() is threading.main_thread(), os.environ["RANK"], Path.cwd().name))
        return "done"

    said = _run_locally(function, tmp_path)
    assert marks == [(True, "0", "work")]
    assert [message.value for message in said if isinstance(message, WorkerFinished)] == ["done"]
    assert [message.reports[0].metrics for message in said if isinstance(message, RankReported)] == [{"loss": 1.0}]
    assert (dict(os.environ), Path.cwd()) == (environment, directory)


def test_an_error_of_an_inline_worker_is_reported(tmp_path: Path) -> None:
    def function() -> None:
        raise RuntimeError("no")

    (exited,) = [message for message in _run_locally(function, tmp_path) if isinstance(message, WorkerExited)]
    assert exited.failure.cause == "raised RuntimeError: no"


def test_report_raises_after_an_inline_worker_was_stopped(tmp_path: Path) -> None:
    raised: list[str] = []

    def function() -> None:
        try:
            while True:
                train.report({})
        except Exception as error:
            raised.append(type(error).__name__)
            raise

    said = _run_locally(function, tmp_path, stop_at_report=True)
    assert raised == ["WireError"]
    assert not [message for message in said if isinstance(message, WorkerExited | WorkerFinished)]


def test_report_blocks_while_the_controller_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paused = threading.Event()
    pause = WorkerGroup.pause

    def tell(workers: WorkerGroup) -> None:
        pause(workers)
        paused.set()

    monkeypatch.setattr(WorkerGroup, "pause", tell)

    def function() -> bool:
        for step in range(200):
            train.report({"step": step, "text": "x" * 500_000})
        return paused.is_set()

    said = _run_locally(function, tmp_path, read_after=paused)
    steps = [report.number for message in said if isinstance(message, RankReported) for report in message.reports]
    assert steps == list(range(1, 201))
    assert [message.value for message in said if isinstance(message, WorkerFinished)] == [True]

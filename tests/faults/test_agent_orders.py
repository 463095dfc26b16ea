"""Orders of the controller that overlap: stop while preparing, a new generation, a second job, pings."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.faults.desk import at_desk, gone, hold, job_of

from holdfast import train
from holdfast.core.commands import StopWorkers
from holdfast.core.events import AgentPrepared, WorkersStopped
from holdfast.wire.messages import Ping, Pong


def test_a_stop_while_the_zygote_still_imports_is_answered_at_once(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "waits_at_import.py").write_text(f"open({str(gate)!r}).read()\n")

    def function() -> int:
        return 7

    async def test() -> None:
        async with at_desk(tmp_path / "desk") as desk:
            order = desk.prepare_order(job_of(function), preload=["waits_at_import"], sys_path=[str(tmp_path)])
            desk.send(order)
            desk.start(generation=1)
            desk.send(StopWorkers(generation=1))
            await desk.expect(WorkersStopped, generation=1)
            assert not [message for message in desk.said if isinstance(message, AgentPrepared)]
            await asyncio.get_running_loop().run_in_executor(None, gate.write_text, "go on")
            await desk.expect(AgentPrepared)
            desk.start(generation=2)
            assert (await desk.finished()).generation == 2

    hold(test)


def test_a_new_generation_replaces_one_that_was_not_stopped(tmp_path: Path) -> None:
    def function() -> None:
        train.report({})
        signal.pause()

    async def test() -> None:
        async with at_desk(tmp_path) as desk:
            await desk.prepare(job_of(function))
            first = await desk.started(generation=1, ranks=2)
            await desk.expect_report(2)
            second = await desk.started(generation=2, ranks=2)
            await gone(*first.values())
            os.kill(second[0], 0)

    hold(test)


def test_a_second_job_replaces_the_first(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_desk(tmp_path) as desk:
            for generation, value in ((1, "one"), (2, "two")):
                await desk.prepare(job_of(lambda config: config["value"], {"value": value}))
                desk.start(generation)
                assert (await desk.finished()).value == value
                await desk.stop(generation)

    hold(test)


def test_a_ping_is_answered(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_desk(tmp_path) as desk:
            desk.send(Ping())
            await desk.expect(Pong)

    hold(test)

"""Orders of the controller that overlap: stop while preparing, a new generation, a second job, pings."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.faults.agent_harness import job_of, run_async, started_agent, wait_gone

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
        async with started_agent(tmp_path / "harness") as harness:
            harness.send_prepare(job_of(function), preload=["waits_at_import"], sys_path=[str(tmp_path)])
            harness.start(generation=1)
            harness.send(StopWorkers(generation=1))
            await harness.expect(WorkersStopped, generation=1)
            assert not [message for message in harness.messages if isinstance(message, AgentPrepared)]
            await asyncio.get_running_loop().run_in_executor(None, gate.write_text, "go on")
            await harness.expect(AgentPrepared)
            harness.start(generation=2)
            assert (await harness.finished()).generation == 2

    run_async(test)


def test_a_new_generation_replaces_one_that_was_not_stopped(tmp_path: Path) -> None:
    def function() -> None:
        train.report({})
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function))
            first = await harness.started(generation=1, ranks=2)
            await harness.expect_report(2)
            second = await harness.started(generation=2, ranks=2)
            await wait_gone(*first.values())
            os.kill(second[0], 0)

    run_async(test)


def test_a_second_job_replaces_the_first(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            for generation, value in ((1, "one"), (2, "two")):
                await harness.prepare(job_of(lambda config: config["value"], {"value": value}))
                harness.start(generation)
                assert (await harness.finished()).value == value
                await harness.stop(generation)

    run_async(test)


def test_a_ping_is_answered(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            harness.send(Ping())
            await harness.expect(Pong)

    run_async(test)

"""A stalled disk under the agent's log files: the agent continues, workers wait, and no output is lost. Nor is it when
rank 0 moves to another agent, and the former one stores what it has later."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.faults.agent_harness import RUN, AgentHarness, job_of, run_async, started_agent

from holdfast.wire.messages import CloseRun, Ping, Pong, RunClosed

_LINES = 200_000


def _chatter() -> None:
    for number in range(_LINES):
        print(f"line {number:06d} {'x' * 80}")
    print("done", flush=True)


def test_a_stalled_log_disk_does_not_block_the_agent(tmp_path: Path) -> None:
    """The log file is a pipe that is not read for a while: the agent answers pings, and no output is lost."""
    log = tmp_path / "cache" / "agents" / "a1" / "runs" / RUN / "logs" / "generation_000001" / "rank_0.log"

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(_chatter))
            log.parent.mkdir(parents=True)
            os.mkfifo(log)
            reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
            try:
                await harness.started()
                await harness.expect_line("line 000000")
                for _ in range(3):
                    harness.send(Ping())
                    await harness.expect(Pong)
                os.set_blocking(reader, True)
                received = bytearray()
                while not received.endswith(b"done\n"):
                    received += os.read(reader, 1 << 20)
                await harness.finished()
            finally:
                os.close(reader)
            assert received.splitlines() == [f"line {n:06d} {'x' * 80}".encode() for n in range(_LINES)] + [b"done"]

    run_async(test)


def _print_generation() -> None:
    print(f"generation {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)


def test_an_agent_that_stood_still_does_not_replace_the_output_of_the_next(tmp_path: Path) -> None:
    first, second = AgentHarness(tmp_path / "first"), AgentHarness(tmp_path / "second")
    second.storage = first.storage

    async def run_on(harness: AgentHarness, generation: int) -> None:
        await harness.prepare(job_of(_print_generation), output_files=("printed", "warned"))
        await harness.started(generation)
        await harness.finished()

    async def close(harness: AgentHarness) -> None:
        harness.send(CloseRun(flush_s=60.0))
        await harness.expect(RunClosed)

    async def test() -> None:
        async with started_agent(first), started_agent(second):
            await run_on(first, 1)
            first.process.send_signal(signal.SIGSTOP)
            await run_on(second, 2)
            await close(second)
            assert (first.storage / "printed").read_text() == "generation 1\n"
            first.process.send_signal(signal.SIGCONT)
            await close(first)
            assert (first.storage / "printed").read_text() == "generation 0\ngeneration 1\n"
            assert not (first.storage / "warned").exists()

    run_async(test)

"""A stalled disk under the agent's log files: the agent continues, workers wait, and no output is lost."""

from __future__ import annotations

import os
from pathlib import Path

from tests.faults.agent_harness import RUN, job_of, run_async, started_agent

from holdfast.wire.messages import Ping, Pong

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

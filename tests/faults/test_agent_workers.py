"""Workers of a real agent: start, reports, output, and every way in which they can end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.faults.agent_harness import AgentHarness, job_of, run_async, started_agent, wait_gone

from holdfast import train
from holdfast.core.events import RankReported, WorkerExited
from holdfast.wire.messages import Shutdown, Stacks


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "cold"])
def test_a_function_runs_and_finishes(tmp_path: Path, fork: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # or what the user says is left as it is

    def function(config: dict[str, Any]) -> dict[str, Any]:
        names = [
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "MASTER_PORT",
            "TORCHELASTIC_RESTART_COUNT",
            "OMP_NUM_THREADS",
            "MINE",
        ]
        return {**config, **{name: os.environ.get(name) for name in names}, "cwd": str(Path.cwd())}

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            prepared = await harness.prepare(job_of(function, {"lr": 1}), fork=fork, environment={"MINE": "yes"})
            assert (prepared.cold_reason is None) == fork
            port = harness.master_port
            pids = await harness.started(generation=1, ranks=2)
            value = (await harness.finished(rank=0)).value
            assert value == {
                "lr": 1,
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": "0",
                "OMP_NUM_THREADS": "1",
                "MINE": "yes",
                "cwd": str(tmp_path / "work"),
            }
            assert (await harness.finished(rank=1)).value is None
            await wait_gone(*pids.values())
            assert (await harness.stop()).master_port != port

    run_async(test)


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "cold"])
def test_an_exception_is_reported_with_its_causes_and_without_our_frames(tmp_path: Path, fork: bool) -> None:
    def function() -> None:
        print("about to fail", file=sys.stderr)
        try:
            os.environ["MISSING"]
        except KeyError as error:
            raise ValueError("the loss is NaN\nsecond line") from error

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function), fork=fork)
            harness.start()
            exited = await harness.exited()
            assert exited.cause == "raised ValueError: the loss is NaN"
            assert (exited.error_type, exited.error) == ("ValueError", "the loss is NaN\nsecond line")
            assert exited.traceback is not None
            assert "KeyError: 'MISSING'" in exited.traceback and "direct cause" in exited.traceback
            assert "bootstrap" not in exited.traceback
            assert exited.last_lines == ("about to fail",)
            await harness.stop()
            assert not [message for message in harness.messages if isinstance(message, WorkerExited)]

    run_async(test)


@pytest.mark.parametrize(
    ("code", "cause"), [(0, "called sys.exit(0)"), (None, "called sys.exit()"), ("no", "called sys.exit('no')")]
)
def test_sys_exit_is_a_failure(tmp_path: Path, code: object, cause: str) -> None:
    def function(config: dict[str, Any]) -> None:
        sys.exit(config["code"])

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function, {"code": code}))
            harness.start()
            assert (await harness.exited()).cause == cause

    run_async(test)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("os._exit(0)", "exited with code 0 before its function returned"),
        ("os._exit(7)", "exited with code 7"),
        ("kill", "was killed by SIGKILL"),
        ("abort", "was killed by SIGABRT"),
    ],
)
def test_signals_and_os_exit_are_reported_by_exit_status(tmp_path: Path, how: str, cause: str) -> None:
    def function(config: dict[str, Any]) -> None:
        if config["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif config["how"] == "abort":
            os.abort()
        else:
            os._exit(int(config["how"][9]))

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function, {"how": how}))
            harness.start()
            exited = await harness.exited()
            assert exited.cause == cause
            assert ("was killed by" in cause) == (exited.signal is not None)

    run_async(test)


def test_a_segfault_is_reported_with_the_line_that_caused_it(tmp_path: Path) -> None:
    def crash_here() -> None:
        ctypes.string_at(0)

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(crash_here))
            harness.start()
            exited = await harness.exited()
            assert (exited.cause, exited.signal) == ("was killed by SIGSEGV", signal.SIGSEGV)
            assert exited.traceback is not None and "in crash_here" in exited.traceback

    run_async(test)


def test_a_killed_worker_is_noticed_while_its_sibling_goes_on(tmp_path: Path) -> None:
    def function() -> None:
        train.report({"rank": int(os.environ["RANK"])})
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function))
            pids = await harness.started(ranks=2)
            await harness.expect_report(2)
            os.kill(pids[1], signal.SIGKILL)
            assert (await harness.exited(rank=1)).cause == "was killed by SIGKILL"
            os.kill(pids[0], 0)
            await harness.stop()
            await wait_gone(*pids.values())
            assert not [message for message in harness.messages if isinstance(message, WorkerExited)]

    run_async(test)


def test_a_thousand_reports_arrive_in_order(tmp_path: Path) -> None:
    def function() -> None:
        for step in range(1000):
            train.report({"step": step})

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function))
            harness.start()
            await harness.finished()
            assert [report.number for report in harness.reports] == list(range(1, 1001))
            assert [report.metrics for report in harness.reports] == [{"step": step} for step in range(1000)]
            assert len([message for message in harness.messages if isinstance(message, RankReported)]) < 1000

    run_async(test)


def test_the_stacks_of_a_hung_worker_are_dumped_before_it_is_killed(tmp_path: Path) -> None:
    def stuck_in_here() -> None:
        train.report({})
        while True:
            time.sleep(1000)

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(stuck_in_here))
            pids = await harness.started(ranks=2)
            await harness.expect_report(2)
            os.kill(pids[0], signal.SIGSTOP)
            stopped = await harness.stop(dump_stacks=True)
            assert stopped.generation == 1
            texts = {message.rank: message.text for message in harness.messages if isinstance(message, Stacks)}
            assert sorted(texts) == [0, 1]
            assert all("in stuck_in_here" in text for text in texts.values())
            await wait_gone(*pids.values())
            for rank in (0, 1):
                await _stored_log(harness, rank, "in stuck_in_here")

    run_async(test)


def test_processes_that_a_worker_started_are_killed_with_it(tmp_path: Path) -> None:
    def function() -> None:
        mine = os.fork()
        if mine == 0:
            signal.pause()
        escaped = os.fork()
        if escaped == 0:
            os.setsid()
            if os.fork() != 0:
                os._exit(0)
            os.write(1, b"escaped %d\n" % os.getpid())  # one write: both processes have the same pipe
            signal.pause()
        os.write(1, b"child %d\n" % mine)
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function))
            pids = await harness.started()
            await harness.expect_line("child")
            await harness.expect_line("escaped")
            lines = [line.text.split() for logs in harness.logs for line in logs.lines]
            others = {words[0]: int(words[1]) for words in lines}
            os.kill(others["child"], 0)
            os.kill(pids[0], signal.SIGKILL)
            await harness.exited()
            await wait_gone(others["child"])
            await harness.stop()
            await wait_gone(others["escaped"])

    run_async(test)


def test_output_is_forwarded_and_logged(tmp_path: Path) -> None:
    def function() -> None:
        print("first")
        os.write(2, b"from C\n")
        os.system("echo from a child process")
        print("progress 1%\rprogress 99%")
        print("without an end", end="")

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function))
            harness.start()
            await harness.finished()
            await harness.stop()
            got = {(line.stream, line.text) for logs in harness.logs for line in logs.lines}
            assert got == {
                ("stdout", "first"),
                ("stderr", "from C"),
                ("stdout", "from a child process"),
                ("stdout", "progress 99%"),
                ("stdout", "without an end"),
            }
            text = await _stored_log(harness, 0, "without an end\n")
            assert "progress 1%\rprogress 99%\n" in text

    run_async(test)


def test_stop_is_idempotent_and_ignores_unknown_generations(tmp_path: Path) -> None:
    def function() -> None:
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function))
            await harness.stop(generation=17)
            pids = await harness.started()
            await harness.stop()
            await harness.stop()
            await wait_gone(*pids.values())
            harness.start(generation=2)
            await harness.stop(generation=2)

    run_async(test)


async def _stored_log(harness: AgentHarness, rank: int, text: str) -> str:
    """The rank's log in storage, once the agent was sent home politely."""
    file = harness.storage / "logs" / "generation_000001" / f"rank_{rank}.log"
    if harness.process.poll() is None:
        harness.send(Shutdown())
        await harness.agent_ended()
    found = file.read_bytes().decode()
    assert text in found
    return found

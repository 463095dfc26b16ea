"""Named semaphores of processes that a worker started by spawn or forkserver are unlinked when the worker ends.

multiprocessing gives each worker that uses them a resource tracker, a process that unlinks them when the last
holder of its pipe has ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
from tests.faults.agent_harness import AgentHarness, job_of, run_async, started_agent, wait_gone
from tests.faults.programs import processes

from holdfast import train
from holdfast.wire.messages import Shutdown


def _with_semaphores(config: dict[str, str]) -> None:
    """Hold semaphores, start a child that leaves its group and holds another, and print the names."""
    names: list[str] = []
    register = resource_tracker.register

    def recording(name: Any, kind: str) -> None:
        names.append(name)
        register(name, kind)

    resource_tracker.register = recording  # type: ignore[assignment]
    context: Any = multiprocessing.get_context(config["method"])
    held = [context.Lock(), context.Queue()]
    printed, written = os.pipe()
    left_group = os.fork()
    if left_group == 0:  # has a tracker of its own, which no exit of its parent ends
        os.setsid()
        resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
        held.append(context.Lock())
        print(f"name {names[-1]}", flush=True)
        os.write(written, b".")
        signal.pause()
    os.read(printed, 1)
    child = context.Process(target=time.sleep, args=(3600,), daemon=True)
    child.start()
    for name in names:
        print(f"name {name}", flush=True)
    print(f"pid {child.pid}", flush=True)
    print(f"pid {left_group}", flush=True)
    print(f"pid {resource_tracker._resource_tracker._pid}", flush=True)  # type: ignore[attr-defined]
    train.report({})
    if config["end"] == "raises":
        raise ValueError("as the test asks")
    if config["end"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


class _Semaphores:
    """The semaphores whose names a test's processes printed; those of other programs do not matter."""

    def __init__(self) -> None:
        self.files: set[Path] = set()

    def add(self, names: list[str]) -> None:
        self.files = {Path(f"/dev/shm/sem.{name.removeprefix('/')}") for name in names}

    def left(self) -> set[Path]:
        return {file for file in self.files if file.exists()}


@pytest.fixture
def semaphores() -> Iterator[_Semaphores]:
    made = _Semaphores()
    yield made
    for file in made.files:
        file.unlink(missing_ok=True)


async def _running(
    harness: AgentHarness, semaphores: _Semaphores, method: str, end: str, fork: bool = True
) -> list[int]:
    """The pids of the worker and all processes that it started, when all of them have their semaphores."""
    await harness.prepare(job_of(_with_semaphores, {"method": method, "end": end}), fork=fork)
    worker = (await harness.started())[0]
    await harness.expect_report()
    while True:
        words = [line.text.split() for logs in harness.logs for line in logs.lines]
        names = [word[1] for word in words if word[0] == "name"]
        pids = [int(word[1]) for word in words if word[0] == "pid"]
        if len(pids) == 3 and len(names) >= 5:
            semaphores.add(names)
            return [worker, *pids]
        await harness.expect_more_logs()


@pytest.mark.parametrize("end", ["raises", "killed", "stopped"])
@pytest.mark.parametrize(
    ("method", "fork"), [("spawn", True), ("forkserver", True), ("spawn", False)], ids=["spawn", "forkserver", "cold"]
)
def test_a_worker_that_ends_leaves_no_named_semaphore(
    tmp_path: Path, semaphores: _Semaphores, method: str, fork: bool, end: str
) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            pids = await _running(harness, semaphores, method, end, fork)
            if end == "stopped":
                assert semaphores.left() == semaphores.files
            else:
                await harness.exited()
            await harness.stop()
            assert semaphores.left() == set()
            await wait_gone(*pids)

    run_async(test)


@pytest.mark.parametrize("whom", ["zygote", "agent"])
def test_a_killed_zygote_or_agent_leaves_no_named_semaphore(tmp_path: Path, semaphores: _Semaphores, whom: str) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await _running(harness, semaphores, "spawn", "stopped")
            assert semaphores.left() == semaphores.files
            below = processes.descendants(harness.process.pid)
            os.kill(harness.zygote() if whom == "zygote" else harness.process.pid, signal.SIGKILL)
            await wait_gone(*below)
            assert semaphores.left() == set()

    run_async(test)


def test_a_resource_tracker_that_does_not_end_is_killed(tmp_path: Path, semaphores: _Semaphores) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            pids = await _running(harness, semaphores, "spawn", "stopped")
            tracker = pids[-1]
            assert "resource_tracker" in processes.command_of(tracker)
            os.kill(tracker, signal.SIGSTOP)
            await harness.stop()
            await wait_gone(*pids)
            lines = [line.text for logs in harness.logs for line in logs.lines]
            assert [line for line in lines if "replaced" in line] == []

    run_async(test)


_LOCKS_AT_IMPORT = """
import multiprocessing
LOCK = multiprocessing.get_context("spawn").Lock()
"""


def test_the_zygotes_resource_tracker_outlives_generations(tmp_path: Path, semaphores: _Semaphores) -> None:
    (tmp_path / "locks_at_import.py").write_text(_LOCKS_AT_IMPORT)

    def function() -> None:
        import locks_at_import  # type: ignore[import-not-found]

        train.report({"name": locks_at_import.LOCK._semlock.name})
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path / "harness") as harness:
            search = [str(tmp_path), *sys.path]
            await harness.prepare(job_of(function), preload=["locks_at_import"], sys_path=search)
            for generation in (1, 2):
                await harness.started(generation)
                await harness.expect_report(generation)
                semaphores.add([report.metrics["name"] for report in harness.reports if report.metrics])
                assert len(semaphores.files) == 1
                await harness.stop(generation)
                assert semaphores.left() == semaphores.files
            harness.send(Shutdown())
            assert await harness.agent_ended() == 0
            assert semaphores.left() == set()

    run_async(test)

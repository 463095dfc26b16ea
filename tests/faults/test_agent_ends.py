"""Whichever process is killed, no process, file or descriptor is left behind."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from tests.faults.agent_harness import AgentHarness, job_of, run_async, started_agent, wait_gone
from tests.faults.programs import processes

from holdfast import train
from holdfast.agent.process_directory import sweep_dead
from holdfast.agent.session_dir import SessionDir
from holdfast.core.events import WorkerExited
from holdfast.wire.messages import Shutdown


def _with_grandchild() -> None:
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pause()
    print(f"child {child}", flush=True)
    train.report({})
    signal.pause()


async def _running(harness: AgentHarness) -> list[int]:
    """Everything below the agent, with two workers and a grandchild of each that left its group."""
    await harness.prepare(job_of(_with_grandchild))
    pids = await harness.started(ranks=2)
    await harness.expect_report(2)
    while True:
        lines = [line.text.split() for logs in harness.logs for line in logs.lines]
        children = [int(words[1]) for words in lines if words[0] == "child"]
        if len(children) == 2:
            break
        await harness.expect_more_logs()
    assert harness.leftovers()
    return [harness.zygote(), *pids.values(), *children]


def test_workers_and_zygote_die_with_a_killed_agent(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            below = await _running(harness)
            harness.process.kill()
            await wait_gone(*below)
            assert harness.leftovers() == []

    run_async(test)


def test_what_a_killed_agent_leaves_is_not_removed_from_under_the_next_of_its_name(tmp_path: Path) -> None:
    """Its zygote may come to it late, when somebody has started the agent again."""

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            below = await _running(harness)
            zygote = below[0]
            os.kill(zygote, signal.SIGSTOP)
            harness.process.kill()
            harness.process.wait()
            again = SessionDir("a1", harness.cache)
            os.kill(zygote, signal.SIGCONT)
            await wait_gone(*below)
            assert again.path.is_dir() and again.lock_path.exists() and again.temp_link is not None
            again.remove()
            assert harness.leftovers() == []

    run_async(test)


def test_an_agent_whose_connection_is_cut_ends_all_its_processes(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            below = await _running(harness)
            await harness.disconnect()
            assert await harness.agent_ended() == 0
            await wait_gone(*below)
            assert harness.leftovers() == []

    run_async(test)


_TIDIES_UP_LATER = """
import sys
if "holdfast.agent" in sys.orig_argv:
    from holdfast.agent.session_dir import SessionDir
    remove = SessionDir.remove
    def later(self):
        open({gate!r}).close()
        remove(self)
    SessionDir.remove = later
"""


class _MortalHarness(AgentHarness):
    """Its agent is started by a thread that ends on request, which triggers the agent's parent death signal."""

    def launch(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        self._ends = threading.Event()
        started: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

        def live() -> None:
            started.put(subprocess.Popen(command, env=environment))
            self._ends.wait()

        self._thread = threading.Thread(target=live, daemon=True)
        self._thread.start()
        return started.get()

    def die(self) -> None:
        own = Path(f"/proc/self/task/{self._thread.native_id}")
        self._ends.set()
        self._thread.join()
        processes.wait_until(lambda: not own.exists(), "the end of the thread")


@pytest.mark.parametrize("how", ["disconnect", "shutdown"])
def test_an_agent_that_is_cleaning_up_survives_the_death_of_its_controller(tmp_path: Path, how: str) -> None:
    """The agent has stopped its zygote, and is about to clean up, when the controller dies."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "sitecustomize.py").write_text(_TIDIES_UP_LATER.format(gate=str(gate)))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    async def test() -> None:
        harness = _MortalHarness(tmp_path / "harness")
        async with started_agent(harness, PYTHONPATH=path):
            below = await _running(harness)
            if how == "disconnect":
                await harness.disconnect()
            else:
                harness.send(Shutdown())
            await wait_gone(*below)
            harness.die()
            opening = asyncio.get_running_loop().run_in_executor(None, gate.write_bytes, b"")
            ended = asyncio.ensure_future(harness.agent_ended())
            await asyncio.wait([opening, ended], return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                os.close(os.open(gate, os.O_RDONLY | os.O_NONBLOCK))  # nobody came: let the other thread go
            await opening
            assert await ended == 0
            assert harness.leftovers() == []

    run_async(test)


def test_shutdown_and_sigterm_leave_nothing_but_the_logs(tmp_path: Path) -> None:
    async def test() -> None:
        for how in ("shutdown", "sigterm"):
            async with started_agent(tmp_path / how) as harness:
                below = await _running(harness)
                if how == "shutdown":
                    harness.send(Shutdown())
                else:
                    harness.process.terminate()
                assert await harness.agent_ended() == 0
                await wait_gone(*below)
                assert harness.leftovers() == []
                assert (harness.storage / "logs" / "generation_000001" / "rank_1.log").read_text().startswith("child")

    run_async(test)


def test_a_killed_zygote_is_reported_and_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            zygote, *below = await _running(harness)
            os.kill(zygote, signal.SIGKILL)
            for rank in (0, 1):
                assert "zygote, which was killed by SIGKILL" in (await harness.exited(rank)).cause
            await wait_gone(*below)
            await harness.stop()
            pids = await harness.started(generation=2, ranks=2)
            await harness.expect_report(4)
            await harness.stop(generation=2)
            await wait_gone(*pids.values())

    run_async(test)


def test_a_worker_killed_right_after_its_fork_is_reported(tmp_path: Path) -> None:
    def function() -> None:
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function))
            for generation in range(1, 11):
                pids = await harness.started(generation, ranks=2)
                os.kill(pids[generation % 2], signal.SIGKILL)
                exited = await harness.expect(WorkerExited, generation=generation)
                assert exited.failure.cause == "was killed by SIGKILL"
                await harness.stop(generation)
                await wait_gone(*pids.values())

    run_async(test)


def test_twenty_generations_leak_no_descriptor(tmp_path: Path) -> None:
    def function() -> None:
        train.report({})
        signal.pause()

    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await harness.prepare(job_of(function))
            counts = []
            for generation in range(1, 21):
                await harness.started(generation, ranks=2)
                await harness.expect_report(2 * generation)
                await harness.stop(generation)
                counts.append((_descriptors(harness.process.pid), _zygote_descriptors(harness)))
            agents, zygotes = zip(*counts, strict=True)
            # A log on its way to storage comes and goes, and so does the socket to the next zygote: of the last ones
            # the least counts, since what leaks stays.
            assert min(agents[-5:]) <= max(agents[:5]), agents
            assert min(zygotes[-5:]) <= max(zygotes[:5]), zygotes

    run_async(test)


def _zygote_descriptors(harness: AgentHarness) -> int:
    """Asks again if the zygote was replaced meanwhile: of a process that ended only root may list the descriptors."""
    while True:
        pid = harness.zygote()
        try:
            return _descriptors(pid)
        except (FileNotFoundError, PermissionError):
            processes.wait_gone(pid)


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_session_directories_of_dead_agents_only_are_removed(tmp_path: Path) -> None:
    mine = SessionDir("mine", tmp_path)
    agents = tmp_path / "agents"
    (agents / "dead").mkdir()
    (agents / "dead.lock").touch()
    (agents / "nobody").mkdir()
    assert sweep_dead(agents) == ["dead", "nobody"]
    assert mine.path.exists()
    with pytest.raises(FileExistsError, match="Another agent mine"):
        SessionDir("mine", tmp_path)
    mine.remove()
    assert list(agents.iterdir()) == []

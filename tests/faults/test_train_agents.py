"""An agent or its zygote is killed: the run continues with another. Agents stand in for nodes."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from tests.faults.programs import processes
from tests.faults.programs.driver import Driver
from tests.faults.programs.exact import check_exact, ends, starts
from tests.faults.programs.random_kills import end
from tests.faults.programs.sandbox import Sandbox

from holdfast.core import records as r
from holdfast.engines.local import LocalEngine

_STEPS = 8
_HELD: dict[str, Any] = {"steps": _STEPS, "every": 2, "faults": {"1:0:5": "hold", "1:1:5": "hold"}}
_TWO_NODES = {"HOLDFAST_LOCAL_NODES": "2"}
_ONE_FAILURE = {"max_failures": 1}


def _held(sandbox: Sandbox, nodes: dict[str, str], **options: Any) -> Driver:
    driver = sandbox.start_driver(_HELD, nodes, **options)
    driver.expect("CheckpointCommitted", iteration=4)
    driver.expect_step(4)
    return driver


def test_one_of_two_agents_is_killed(sandbox: Sandbox) -> None:
    driver = _held(sandbox, _TWO_NODES, failure=_ONE_FAILURE)
    (held,) = starts(sandbox)
    (second,) = [pid for pid in driver.agents() if held.agents[1] in processes.command_of(pid)]
    below = processes.descendants(second)
    os.kill(second, signal.SIGKILL)
    processes.wait_gone(*below)
    driver.value()
    check_exact(sandbox, _STEPS)
    (ended,) = ends(sandbox)
    assert ended.counted
    assert [failure.rank for failure in ended.failures] == [1]
    assert "was lost with its node" in ended.failures[0].cause
    assert "killed by SIGKILL" in ended.failures[0].cause
    before, after = starts(sandbox)
    assert after.iteration == 4
    assert after.agents[0] == before.agents[0]  # rank 0 stays where it was
    assert after.agents[1] != before.agents[1]


def test_all_agents_are_killed(sandbox: Sandbox) -> None:
    driver = _held(sandbox, _TWO_NODES, failure={"max_failures": 2})
    for agent in driver.agents():
        os.kill(agent, signal.SIGKILL)
    driver.value()
    check_exact(sandbox, _STEPS)


def test_a_lost_agent_counts_as_a_failure(sandbox: Sandbox) -> None:
    driver = _held(sandbox, _TWO_NODES)
    os.kill(driver.agents()[0], signal.SIGKILL)
    raised = driver.raised()
    assert raised["type"] == "WorkerGroupError"
    assert "was lost with its node" in raised["text"]


def test_the_only_agent_is_killed(sandbox: Sandbox) -> None:
    driver = _held(sandbox, {}, failure=_ONE_FAILURE)
    (agent,) = driver.agents()
    os.kill(agent, signal.SIGKILL)
    driver.value()
    check_exact(sandbox, _STEPS)
    gone = [record for record in sandbox.records() if isinstance(record, r.AgentRemoved)]
    assert gone and "SIGKILL" in gone[0].why


def test_the_exit_status_of_an_agent_that_dies_slowly_is_reported(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends first."""
    gone = LocalEngine._process_exited

    def late(self: LocalEngine, name: str) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._running[name].pidfd)
        loop.call_later(0.3, gone, self, name)

    monkeypatch.setattr(LocalEngine, "_process_exited", late)
    sandbox.fit({"steps": _STEPS, "every": 2, "faults": {"1:0:3": "kill-agent"}}, failure=_ONE_FAILURE)
    check_exact(sandbox, _STEPS)
    (ended,) = ends(sandbox)
    assert all("its agent was killed by SIGKILL" in failure.cause for failure in ended.failures)


def _stillborn(sandbox: Sandbox, count: int) -> dict[str, str]:
    """The environment in which the first `count` agents exit as soon as Python has started. None is forked."""
    directory = sandbox.root / "site"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        f"deaths = pathlib.Path({str(sandbox.root / 'deaths')!r})\n"
        "if b'holdfast.agent' in pathlib.Path('/proc/self/cmdline').read_bytes():\n"
        "    so_far = len(deaths.read_text()) if deaths.exists() else 0\n"
        f"    if so_far < {count}:\n"
        "        deaths.write_text('x' * (so_far + 1))\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "HOLDFAST_FORK_DRIVER": "0"}


def test_an_agent_that_dies_before_it_joined_does_not_count_as_a_failure(sandbox: Sandbox) -> None:
    driver = sandbox.start_driver({"steps": _STEPS, "every": 2}, _stillborn(sandbox, 2))
    driver.value()
    check_exact(sandbox, _STEPS)
    assert ends(sandbox) == []


def test_agents_that_never_start_end_the_run_with_a_clear_error(sandbox: Sandbox) -> None:
    driver = sandbox.start_driver({"steps": _STEPS, "every": 2}, _stillborn(sandbox, 1000))
    raised = driver.raised()
    assert raised["type"] == "ControllerError"
    assert "No agent could be started" in raised["text"]
    assert "SIGKILL" in raised["text"]


def test_the_zygote_is_killed(sandbox: Sandbox) -> None:
    driver = _held(sandbox, {}, failure=_ONE_FAILURE)
    (zygote,) = driver.zygotes()
    below = processes.descendants(zygote)
    os.kill(zygote, signal.SIGKILL)
    processes.wait_gone(*below)
    driver.value()
    check_exact(sandbox, _STEPS)
    (ended,) = ends(sandbox)
    assert "zygote" in ended.failures[0].cause


def test_an_agent_is_killed_in_the_middle_of_an_upload(sandbox: Sandbox) -> None:
    """The part that it held is lost, the checkpoint never was, and what it had sent is cleared away."""
    config = {"steps": 4, "every": 2, "ballast_bytes": 24 << 20, "faults": {}}
    driver = sandbox.start_driver(config, _TWO_NODES, job="heavy_steps", failure=_ONE_FAILURE)
    started = sandbox.storage / "run" / "checkpoint_000000" / "rank_1.bin"
    processes.wait_until(lambda: any(started.parent.glob("*rank_1.bin*")), "the upload of rank 1")
    end(driver.agents()[1], sandbox.marker, lambda command: "holdfast.agent" in command)
    driver.value()
    check_exact(sandbox, 4)


@pytest.mark.slow
def test_a_stopped_agent_is_lost_after_the_timeout(sandbox: Sandbox) -> None:
    driver = _held(sandbox, _TWO_NODES, failure=_ONE_FAILURE)
    os.kill(driver.agents()[1], signal.SIGSTOP)
    driver.value()
    check_exact(sandbox, _STEPS)
    (ended,) = ends(sandbox)
    assert "silent" in ended.failures[0].cause

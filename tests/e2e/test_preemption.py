"""Agents that are about to be taken away: what drains them, and what becomes of the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.joined_agents import free_port, joined_agent
from tests.e2e.small import save, value_of
from tests.faults.programs.processes import wait_until
from tests.faults.programs.sandbox import Sandbox

from holdfast import train
from holdfast.core import records as r
from holdfast.errors import NotFound
from holdfast.storage.run_secret import open_secret
from holdfast.train import (
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    PreemptionError,
    PreemptionInfo,
    RunConfig,
    ScalingConfig,
)


@pytest.fixture(autouse=True)
def _secret(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents may start before their driver has made the secret. The current directory is sent, so it is a small one."""
    open_secret()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOLDFAST_AGENTS_TIMEOUT_S", "90")


def _trainer(
    sandbox: Sandbox, port: int, function: Callable[..., Any], max_preemption_failures: int = -1
) -> DataParallelTrainer:
    return DataParallelTrainer(
        function,
        train_loop_config={"root": str(sandbox.root)},
        scaling_config=ScalingConfig(num_workers=1, engine="join", listen=f"127.0.0.1:{port}"),
        run_config=RunConfig(
            name="run",
            storage_path=sandbox.storage,
            verbose=0,
            failure_config=FailureConfig(max_preemption_failures=max_preemption_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


def _records(sandbox: Sandbox, kind: type[Any]) -> list[Any]:
    """The records of this kind so far."""
    with suppress(NotFound):  # the run's directory is being made
        return [record for record in sandbox.records() if isinstance(record, kind)]
    return []


def _steps(config: dict[str, Any]) -> int:
    """One checkpoint after the other, until the test has seen enough."""
    found = train.get_checkpoint()
    step = 0 if found is None else value_of(found)
    root = Path(config["root"])
    (root / "place").write_text(os.environ["TEST_AGENT"])
    while not (root / "enough").exists():
        step += 1
        save(step, checkpoint_upload_mode=train.CheckpointUploadMode.SYNC)
    return step


@pytest.mark.parametrize("source", ["SIGTERM", "notice file"])
def test_a_drained_agent_ends_when_its_run_has_moved_and_no_step_is_lost(sandbox: Sandbox, source: str) -> None:
    port, place, notice = free_port(), sandbox.root / "place", sandbox.root / "notice"
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        stack.callback((sandbox.root / "enough").touch)
        result = threads.submit(_trainer(sandbox, port, _steps).fit)
        agents = {
            name: stack.enter_context(joined_agent(port, name, "--slots", "1", "--notice-file", str(notice / name)))
            for name in ("a", "b")
        }
        notice.mkdir()
        wait_until(lambda: _records(sandbox, r.CheckpointCommitted), "a checkpoint is committed")
        first = place.read_text()
        if source == "SIGTERM":
            agents[first].send_signal(signal.SIGTERM)
        else:
            (notice / first).write_text("60")
        assert agents[first].wait(60) == 0
        wait_until(lambda: place.read_text() != first, "the run has moved")
        (sandbox.root / "enough").touch()
        steps = result.result(60).return_value
    (started,) = _records(sandbox, r.DrainStarted)
    left_s = {"SIGTERM": 23.0, "notice file": 58.0}[source]
    assert (started.agent, started.why, round(started.deadline - started.at, 3)) == (first, source, left_s)
    (ended,) = _records(sandbox, r.GenerationEnded)
    assert (ended.counted, ended.why) == (False, f"agent {first} is being drained: {source}")
    committed = [one.iteration for one in _records(sandbox, r.CheckpointCommitted)]
    assert committed == list(range(1, steps + 1)), "no step was lost, and none was committed twice"


def _hold_on_first(config: dict[str, Any]) -> str:
    """Say which agent this is, and on the first one what becomes of it, without ever reporting."""
    root = Path(config["root"])
    try:
        (root / "first").open("x").write(os.environ["TEST_AGENT"])
    except FileExistsError:
        return os.environ["TEST_AGENT"]
    while (info := train.get_preemption_info()) is None:
        time.sleep(0.05)
    (root / "info.new").write_text(repr(info))
    (root / "info.new").rename(root / "info")
    signal.pause()
    raise AssertionError("it was killed")


@pytest.mark.parametrize("end", ["deadline", "second SIGTERM"])
def test_a_drained_agent_whose_run_cannot_move_ends_at_its_deadline_or_at_a_second_signal(
    sandbox: Sandbox, end: str
) -> None:
    """A loss of the node either way; it is no failure, and there is a budget of its own for it."""
    port, first = free_port(), sandbox.root / "first"
    deadline = "3" if end == "deadline" else "300"
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        result = threads.submit(_trainer(sandbox, port, _hold_on_first, 0 if end == "deadline" else 1).fit)
        agents = {
            name: stack.enter_context(joined_agent(port, name, "--slots", "1", "--drain-deadline", deadline))
            for name in ("a", "b")
        }
        wait_until(lambda: first.exists() and first.read_text(), "the first worker runs")
        agent = agents.pop(first.read_text())
        agent.send_signal(signal.SIGTERM)
        if end == "second SIGTERM":
            wait_until((sandbox.root / "info").exists, "the worker knows")
            agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 0
        if end == "deadline":
            with pytest.raises(PreemptionError) as caught:
                result.result(60)
            assert caught.value.preemption_info.preempted_ranks == [0]
        else:
            assert result.result(60).return_value in agents
    (ended,) = _records(sandbox, r.GenerationEnded)
    (started,) = _records(sandbox, r.DrainStarted)
    assert (ended.counted, ended.preemption.ranks) == (False, {started.agent: (0,)})
    if end == "second SIGTERM":
        info = PreemptionInfo(int(started.deadline * 1000), {started.agent: [0]})
        assert (sandbox.root / "info").read_text() == repr(info)


def test_an_agent_without_a_controller_ends_at_the_first_signal(sandbox: Sandbox) -> None:
    port = free_port()
    with joined_agent(port, "a", "--dial", "600") as agent:
        wait_until(lambda: list(sandbox.cache.glob("agents/*")), "the agent is set up")
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 0


@pytest.mark.parametrize("moment", ["the run has ended", "the driver is done"])
def test_an_agent_that_stays_ends_at_a_signal_as_its_controller_ends(sandbox: Sandbox, moment: str) -> None:
    port = free_port()
    with ExitStack() as stack:
        agent = stack.enter_context(joined_agent(port, "a", "--stay", "--drain-deadline", "600"))
        threads = stack.enter_context(ThreadPoolExecutor())
        result = threads.submit(_trainer(sandbox, port, _do_nothing).fit)
        if moment == "the run has ended":
            wait_until(lambda: _has_record(sandbox, r.RunFinished), moment)
        else:
            result.result(60)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 0
        result.result(60)


def _do_nothing(config: dict[str, Any]) -> None:
    train.report({"step": 1})


def _has_record(sandbox: Sandbox, kind: type[r.Record]) -> bool:
    with suppress(NotFound):
        return any(isinstance(record, kind) for record in sandbox.records())
    return False


def test_an_agent_does_not_start_where_the_notice_is_there_already(sandbox: Sandbox) -> None:
    (sandbox.root / "notice").touch()
    with joined_agent(free_port(), "a", HOLDFAST_NOTICE_FILE=str(sandbox.root / "notice")) as agent:
        assert agent.wait(60) == 2
        assert agent.stderr is not None and "remove it to start an agent here" in agent.stderr.read()

"""One agent, several runs: what one run does, or is done to it, changes no other."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
from tests.faults.agent_harness import AgentHarness, job_of, run_async, started_agent, wait_gone
from tests.faults.programs import processes

from holdfast import train
from holdfast.core.checkpoint_types import Draft
from holdfast.core.commands import AnnounceCheckpoint, Place
from holdfast.core.events import AgentPrepared, Ticket, WorkerExited, WorkerFinished
from holdfast.wire.messages import CloseRun, PrepareRun, RunClosed, Upload, Uploaded


def _wait(config: dict[str, Any]) -> None:
    import time

    while True:
        time.sleep(60)


def _leave(config: dict[str, Any]) -> None:
    import tempfile
    import time

    Path(tempfile.gettempdir(), f"left by {config['name']}").touch()
    print(f"{config['name']} is here")
    while True:
        time.sleep(60)


def _value(config: dict[str, Any]) -> Any:
    return config["value"]


def _report_value(config: dict[str, Any]) -> None:
    directory = Path(config["from"])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "value").write_text(config["value"])
    train.report({}, checkpoint=train.Checkpoint.from_directory(directory))
    _wait(config)


def _report_states(config: dict[str, Any]) -> None:
    """Report a state, wait for a file, and report another."""
    import time

    import numpy

    for last in (False, True):
        while last and not Path(config["until"]).exists():
            time.sleep(0.01)
        train.report({}, checkpoint=train.Checkpoint.from_state({"weights": numpy.zeros(config["size_bytes"], "u1")}))
    _wait(config)


def _snapshot_bytes(agent: int) -> list[int]:
    """The sizes of the snapshot buffers that an agent has, but for empty ones."""
    found = []
    for fd in Path(f"/proc/{agent}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if "holdfast-snapshot" in str(fd.readlink()) and (size_bytes := fd.stat().st_size):
                found.append(size_bytes)
    return found


def _config(**values: Any) -> bytes:
    return cloudpickle.dumps(values)  # type: ignore[no-any-return]


async def _start(harness: AgentHarness, run: str, job: bytes, **config: Any) -> int:
    """Prepare a run and start its only worker; gives the worker's pid."""
    await harness.prepare(job, run, config=_config(**config))
    return (await harness.started(run=run))[0]


def test_runs_with_one_function_share_a_zygote_and_get_their_own_configuration(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            job = job_of(_value, {})
            for run in ("a", "b"):
                await harness.prepare(job, run, config=_config(value=run))
                await harness.started(run=run)
                assert (await harness.expect(WorkerFinished, run=run)).value == run
                harness.zygote()  # there is one only; a successor may have taken its place

    run_async(test)


def test_stopping_one_run_leaves_the_workers_of_another(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            job = job_of(_wait, {})
            first, second = await _start(harness, "a", job), await _start(harness, "b", job)
            await harness.stop(run="a")
            await wait_gone(first)
            assert second in processes.descendants(harness.process.pid)
            os.kill(second, signal.SIGKILL)
            failure = (await harness.expect(WorkerExited, run="b")).failure
            assert failure.cause == "was killed by SIGKILL"
            assert not [one for one in harness.messages if isinstance(one, WorkerExited)]

    run_async(test)


def test_closing_one_run_leaves_nothing_of_it_and_all_of_another(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            job = job_of(_leave, {})
            first, second = [await _start(harness, run, job, name=run) for run in ("a", "b")]
            for run in ("a", "b"):
                await harness.expect_line(f"{run} is here")
            harness.send(CloseRun(), "a")
            await harness.expect(RunClosed, run="a")
            await wait_gone(first)
            (session,) = [path for path in harness.cache.glob("agents/*") if path.is_dir()]
            assert [path.name for path in (session / "tmp").glob("*/left*")] == ["left by b"]
            assert not (session / "runs" / "a").exists()
            assert second in processes.descendants(harness.process.pid)
            await harness.prepare(job, "a", config=_config(name="a"))  # the same run may come again
            assert (await harness.started(run="a"))[0] not in (first, second)

    run_async(test)


def test_checkpoints_of_the_same_name_and_ticket_in_two_runs_do_not_mix(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            job = job_of(_report_value, {})
            for run in ("a", "b"):
                await _start(harness, run, job, value=run, **{"from": str(tmp_path / f"state-{run}")})
            await harness.expect_report(2)
            draft = Draft(name="checkpoint_000000", index=0, epoch=1, token="t")
            for run in ("a", "b"):
                harness.send(Upload(ticket=Ticket(1, 1), rank=0, draft=draft), run)
                await harness.expect(Uploaded, run=run)
                harness.send(AnnounceCheckpoint(ticket=Ticket(1, 1), name=draft.name), run)
            found = [harness.storage.with_name(run) / "checkpoint_000000" / "value" for run in ("a", "b")]
            assert [path.read_text() for path in found] == ["a", "b"]

    run_async(test)


def test_the_snapshots_of_all_runs_share_the_memory_limit_of_the_node(tmp_path: Path) -> None:
    size_bytes = 1 << 20

    async def test() -> None:
        async with started_agent(tmp_path, HOLDFAST_SNAPSHOT_LIMIT_BYTES=str(size_bytes * 3 // 2)) as harness:
            job = job_of(_report_states, {})
            for count, run in enumerate(("a", "b"), 1):
                await _start(harness, run, job, size_bytes=size_bytes, until=str(tmp_path / run))
                await harness.expect_report(count)
            assert len(_snapshot_bytes(harness.process.pid)) == 1  # the other run has written files
            harness.send(CloseRun(), "a")
            await harness.expect(RunClosed, run="a")
            assert not _snapshot_bytes(harness.process.pid)
            (tmp_path / "b").touch()
            await harness.expect_report(3)
            assert len(_snapshot_bytes(harness.process.pid)) == 1

    run_async(test)


def test_a_function_that_arrives_damaged_fails_only_the_runs_that_use_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            job = job_of(_wait, {})
            worker = await _start(harness, "a", job)
            await harness.prepare(job, "b", config=_config(), hash="0" * 64)
            for generation in (1, 2):
                harness.start(generation, ranks=2, run="b")
                for rank in (0, 1):
                    exited = await harness.expect(WorkerExited, run="b", generation=generation)
                    assert exited.failure.rank == rank and exited.failure.agent == "a1"
                    assert "The training function arrived damaged" in exited.failure.cause
                await harness.stop(generation, run="b")
            assert worker in processes.descendants(harness.process.pid)
            assert not [one for one in harness.messages if isinstance(one, WorkerExited)]
            await harness.prepare(job, "b", config=_config())  # as it should be
            assert (await harness.started(3, run="b"))[0]

    run_async(test)


def test_a_working_directory_that_cannot_be_made_fails_only_its_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            job = job_of(_wait, {})
            worker = await _start(harness, "a", job)
            await harness.prepare(job, "b", config=_config(), work_dir="/proc/none/work")
            harness.start(run="b")
            assert "/proc/none" in (await harness.expect(WorkerExited, run="b")).failure.cause
            assert worker in processes.descendants(harness.process.pid)

    run_async(test)


def test_the_death_of_a_zygote_fails_only_the_runs_that_use_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            first = await _start(harness, "a", job_of(_wait, {}))
            zygote = harness.zygote()
            await harness.prepare(job_of(_wait, {}), "b", config=_config(), environment={"OTHER": "yes"})
            second = (await harness.started(run="b"))[0]
            assert len(processes.children(harness.process.pid)) == 2
            os.kill(zygote, signal.SIGKILL)
            assert "zygote" in (await harness.expect(WorkerExited, run="a")).failure.cause
            await wait_gone(first)
            assert second in processes.descendants(harness.process.pid)
            assert not [one for one in harness.messages if isinstance(one, WorkerExited)]

    run_async(test)


def test_a_run_whose_function_was_never_sent_fails_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await _start(harness, "good", job_of(_wait, {}))
            storage = str(harness.storage.with_name("bad"))
            lost = PrepareRun(
                function_key="gone",
                storage=storage,
                experiment="exp",
                trial_id="t",
                trial_dir=storage,
                work_dir=str(tmp_path / "work"),
            )
            harness.send(lost, "bad")
            await harness.expect(AgentPrepared, run="bad")
            harness.start(run="bad")
            ended = await harness.expect(WorkerExited, run="bad")
            assert "not started: The controller has not sent the function 'gone'" in ended.failure.cause
            await harness.stop(run="good")
            await harness.started(generation=2, run="good")

    run_async(test)


def test_a_directory_that_cannot_be_a_path_fails_its_run_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            await _start(harness, "good", job_of(_wait, {}))
            await harness.prepare(job_of(_wait, {}), "bad", work_dir=str(tmp_path / "wo\0rk"))
            harness.start(run="bad")
            ended = await harness.expect(WorkerExited, run="bad")
            assert "internal error of the agent: ValueError('embedded null byte')" in ended.failure.cause
            await harness.stop(run="good")
            await harness.started(generation=2, run="good")

    run_async(test)


def test_an_unexpected_error_fails_the_generation_of_its_run_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with started_agent(tmp_path) as harness:
            job = job_of(_wait, {})
            await _start(harness, "good", job)
            await harness.prepare(job, "bad")
            place = Place(agent="a1", node_rank=0, ranks=(0,))
            harness.start(run="bad", places=(place, place))  # the controller sends each agent its own place only
            ended = await harness.expect(WorkerExited, run="bad")
            assert "internal error of the agent: ValueError" in ended.failure.cause
            await harness.stop(run="bad")
            await harness.started(generation=2, run="bad")
            await harness.stop(run="good")
            await harness.started(generation=2, run="good")

    run_async(test)

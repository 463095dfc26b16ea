"""Snapshots in the agent's memory: complete when `report` returns, kept until the commit, loaded after a restart."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.unit.worker.fake_agent import FakeAgent

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.state.load import load_state
from holdfast.checkpoint.state.plan import Plan
from holdfast.core.checkpoint_types import Snapshot, StagedPart
from holdfast.core.events import WorkerWaited
from holdfast.errors import CheckpointError, ConfigError, NotFound
from holdfast.storage.locate import open_store
from holdfast.train import CheckpointUploadMode
from holdfast.wire.messages import ReserveBuffers, WorkerReport
from holdfast.worker.snapshot_buffer import HEADER_BYTES, UNSEALED, SnapshotBuffer, make_memory

ROOMY = 1 << 30


@pytest.fixture
def buffers() -> Iterator[list[str]]:
    """Two as an agent makes them; this process is the agent."""
    fds = [make_memory("holdfast-test") for _ in range(2)]
    yield [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds]
    for fd in fds:
        os.close(fd)


def state(step: int, count: int = 1000) -> dict[str, Any]:
    return {"step": step, "weights": {"a": numpy.full(count, step, "f8"), "b": numpy.full(3, step, "i4")}}


def report(agent: FakeAgent, step: int, mode: CheckpointUploadMode | None = None, count: int = 1000) -> None:
    agent.session.report({}, Checkpoint.from_state(state(step, count)), None, mode)


def in_thread(action: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=action, args=arguments, daemon=True)
    thread.start()
    return thread


def seal_of(path: str) -> int:
    memory = SnapshotBuffer.open(path, writable=False)
    try:
        return memory.seal
    finally:
        memory.close()


def loaded(snapshots: list[Snapshot], where: Path) -> Any:
    """The state that a restarted worker gets; storage, at `where`, holds nothing unless the test put it there."""
    (where / "run" / "checkpoint_000000").mkdir(parents=True, exist_ok=True)
    with FakeAgent(checkpoint="checkpoint_000000", snapshots=snapshots, storage=str(where / "run")) as agent:
        checkpoint = agent.session.get_checkpoint()
        assert checkpoint is not None
        return checkpoint.load_state()


def step_of(found: Any) -> int:
    """Which step a state is of; fails if it is a mixture."""
    step = found["step"]
    assert (found["weights"]["a"] == step).all() and (found["weights"]["b"] == step).all()
    return int(step)


def test_a_snapshot_is_complete_when_report_returns(buffers: list[str], tmp_path: Path) -> None:
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY) as agent:
        given = state(4)
        agent.session.report({}, Checkpoint.from_state(given), "best")
        given["weights"]["a"][:] = 5
        message = agent.next(WorkerReport)
    assert isinstance(message.part, Snapshot)
    assert message.report.checkpoint and message.report.checkpoint_dir_name == "best" and message.report.stall_s > 0
    assert message.part.buffer in buffers
    memory = SnapshotBuffer.open(message.part.buffer)
    assert memory.seal == message.part.seal != UNSEALED
    for file in message.part.files:
        assert file.offset % 4096 == 0
        (tmp_path / file.path).write_bytes(memory.data[file.offset : file.offset + file.size_bytes])
    memory.close()
    assert step_of(Checkpoint.from_directory(tmp_path).load_state()) == 4


def test_a_third_snapshot_waits_while_two_are_uploaded(buffers: list[str]) -> None:
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY) as agent:
        report(agent, 1)
        report(agent, 2)
        first, second = agent.next().part, agent.next().part
        assert {first.buffer, second.buffer} == set(buffers)
        third = in_thread(report, agent, 3)
        assert agent.next(WorkerWaited).waiting
        assert seal_of(first.buffer) == first.seal
        agent.announce(1, "checkpoint_000000")
        assert not agent.next(WorkerWaited).waiting
        message = agent.next()
        third.join(60)
        assert not third.is_alive()
    assert message.part.buffer == first.buffer
    assert seal_of(second.buffer) == second.seal


def test_metrics_and_directories_are_reported_beside_snapshots(buffers: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY, staging_dir=str(tmp_path / "staging")) as agent:
        report(agent, 1)
        report(agent, 2)
        agent.session.report({"loss": 1.0})
        assert [agent.next().report.number for _ in range(3)] == [1, 2, 3]
        waiting = in_thread(agent.session.report, {}, Checkpoint.from_directory(tmp_path / "mine"))
        assert agent.next(WorkerWaited).waiting
        agent.announce(1, None)
        agent.announce(2, None)
        assert not agent.next(WorkerWaited).waiting
        waiting.join(60)
        assert isinstance(agent.next().part, StagedPart)


def test_the_newest_commit_is_overwritten_last(buffers: list[str]) -> None:
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY) as agent:
        report(agent, 1)
        report(agent, 2)
        kept, given_up = agent.next().part, agent.next().part
        agent.announce(1, "checkpoint_000000")
        agent.announce(2, None)
        report(agent, 3)
        assert agent.next().part.buffer == given_up.buffer
    assert seal_of(kept.buffer) == kept.seal


def test_a_checkpoint_that_is_given_up_does_not_free_the_buffer_of_an_earlier_one(buffers: list[str]) -> None:
    """Its agent was lost with a part of it, and the earlier one is still uploaded."""
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY) as agent:
        report(agent, 1)
        report(agent, 2)
        uploading, given_up = agent.next().part, agent.next().part
        agent.announce(2, None)
        report(agent, 3)
        assert agent.next().part.buffer == given_up.buffer
        assert seal_of(uploading.buffer) == uploading.seal


def test_the_checkpoint_resumed_from_is_overwritten_last(buffers: list[str]) -> None:
    held = Snapshot(buffer=buffers[0], seal=7, files=[])
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY, checkpoint="c", snapshots=[held]) as agent:
        report(agent, 1)
        assert agent.next().part.buffer == buffers[1]


def test_with_memory_for_one_buffer_there_is_one(buffers: list[str]) -> None:
    size = HEADER_BYTES + Checkpoint.from_state(state(1)).plan().size_bytes  # type: ignore[attr-defined]
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=2 * size - 1) as agent:
        report(agent, 1)
        first = agent.next().part
        second = in_thread(report, agent, 2)
        assert agent.next(WorkerWaited).waiting
        agent.announce(1, "checkpoint_000000")
        second.join(60)
        assert agent.next().part.buffer == first.buffer
    other = next(path for path in buffers if path != first.buffer)
    assert os.stat(other).st_size == 0  # noqa: PTH116


def test_a_state_that_grows_beyond_two_gives_the_second_buffer_back(buffers: list[str]) -> None:
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=150_000) as agent:
        for step in (1, 2):
            report(agent, step, count=2000)
            agent.announce(step, None)
        report(agent, 3, count=12_000)
        snapshots = [agent.next().part for _ in range(3)]
    assert snapshots[2].buffer == buffers[0]
    held = [os.stat(path).st_blocks * 512 for path in buffers]  # noqa: PTH116
    assert held[0] > 96_000 and held[1] == 0


def test_without_memory_for_a_buffer_the_state_is_written_as_files(
    buffers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        FakeAgent(buffers=buffers, snapshot_limit_bytes=4096, staging_dir=str(tmp_path), announce_as="c") as agent,
    ):
        report(agent, 1)
        report(agent, 2)
        staged = [Path(agent.next().part.directory) for _ in range(2)]
    assert [path.name for path in staged] == ["g3-r0-n1", "g3-r0-n2"]
    assert step_of(Checkpoint.from_directory(staged[1]).load_state()) == 2
    assert [text for text in caplog.messages if "HOLDFAST_SNAPSHOT_LIMIT_BYTES" in text] == caplog.messages[:1]


def test_memory_that_other_runs_have_is_asked_for_again(
    buffers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY, staging_dir=str(tmp_path), announce_as="c") as agent,
    ):
        parts = []
        for step, buffers_max in enumerate((0, 1, 2, 2)):
            agent.buffers_max = buffers_max
            report(agent, step)
            parts.append(agent.next().part)
        assert isinstance(parts[0], StagedPart)
        assert parts[1].buffer == buffers[0] and parts[2].buffer == buffers[1]
        assert isinstance(parts[3], Snapshot)
    assert "the snapshots of other runs and workers have the memory" in caplog.text


def test_buffers_are_asked_for_once_while_the_size_stays(buffers: list[str]) -> None:
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY, announce_as="c") as agent:
        for step in range(3):
            report(agent, step)
        agent.session.report({}, None, None, None)
        heard: list[Any] = []
        while not heard or not isinstance(heard[-1], WorkerReport) or heard[-1].report.number < 4:
            heard.append(agent.heard.get(timeout=60))
    assert len([one for one in heard if isinstance(one, ReserveBuffers)]) == 1


def test_without_access_to_buffers_the_state_is_written_as_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeAgent(
        buffers=[str(tmp_path / "absent")] * 2, snapshot_limit_bytes=ROOMY, staging_dir=str(tmp_path)
    ) as agent:
        report(agent, 1)
        assert isinstance(agent.next().part, StagedPart)
    assert "cannot be had" in caplog.text


def test_an_interrupted_copy_is_not_marked_complete(buffers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Plan, buffer: memoryview) -> None:
        buffer[:100] = b"x" * 100
        raise RuntimeError("the device is gone")

    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY) as agent:
        report(agent, 1)
        agent.announce(1, None)
        snapshot = agent.next().part
        monkeypatch.setattr(Plan, "write_into", broken)
        with pytest.raises(RuntimeError, match="device"):
            report(agent, 2)
        monkeypatch.undo()
        assert [seal_of(path) for path in buffers] == [UNSEALED, UNSEALED] != [snapshot.seal] * 2
        report(agent, 2)
        assert agent.next().report.number == 2


def test_sync_upload_of_a_snapshot_waits_for_its_commit(buffers: list[str]) -> None:
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY) as agent:
        report(agent, 1)
        assert not agent.next().report.waits
        second = in_thread(report, agent, 2, CheckpointUploadMode.SYNC)
        assert agent.next().report.waits
        agent.announce(1, "checkpoint_000000")
        agent.announce(2, "checkpoint_000001")
        second.join(60)
        assert not second.is_alive()
    with FakeAgent(buffers=buffers, snapshot_limit_bytes=ROOMY, announces=True) as agent:
        with pytest.raises(CheckpointError, match="report 1 was not committed"):
            report(agent, 1, CheckpointUploadMode.SYNC)
        with pytest.raises(ConfigError, match="in memory"):
            report(agent, 1, CheckpointUploadMode.NO_UPLOAD)


def snapshot_of(buffers: list[str], step: int) -> Snapshot:
    with FakeAgent(buffers=buffers[:1], snapshot_limit_bytes=ROOMY) as agent:
        report(agent, step)
        found: Snapshot = agent.next().part
        return found


def test_a_restarted_worker_loads_from_memory(buffers: list[str], tmp_path: Path) -> None:
    assert step_of(loaded([snapshot_of(buffers, 6)], tmp_path)) == 6


def test_a_state_loaded_from_memory_is_a_copy(buffers: list[str], tmp_path: Path) -> None:
    found = loaded([snapshot_of(buffers, 6)], tmp_path)
    snapshot_of(buffers, 7)
    assert step_of(found) == 6


def test_a_reused_buffer_is_not_loaded(buffers: list[str], tmp_path: Path) -> None:
    old = snapshot_of(buffers, 6)
    snapshot_of(buffers, 7)
    with pytest.raises(NotFound):
        loaded([old], tmp_path)
    put(tmp_path, 6)
    assert step_of(loaded([old], tmp_path)) == 6


def test_a_buffer_overwritten_while_loading_is_not_used(
    buffers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = snapshot_of(buffers, 6)

    def slow(*arguments: Any) -> Any:
        found = load_state(*arguments)
        snapshot_of(buffers, 7)
        return found

    monkeypatch.setattr("holdfast.worker.memory_checkpoint.load_state", slow)
    put(tmp_path, 5)
    assert step_of(loaded([snapshot], tmp_path)) == 5


def test_parts_that_are_not_in_memory_are_loaded_from_storage(buffers: list[str], tmp_path: Path) -> None:
    put(tmp_path, 6)
    whole = snapshot_of(buffers, 6)
    some = Snapshot(buffer=whole.buffer, seal=whole.seal, files=whole.files[:1])
    assert step_of(loaded([some], tmp_path)) == 6
    gone = Snapshot(buffer=str(tmp_path / "absent"), seal=whole.seal, files=whole.files)
    assert step_of(loaded([gone], tmp_path)) == 6


def put(where: Path, step: int) -> None:
    """A plain checkpoint of this state in storage."""
    root = open_store(where / "run" / "checkpoint_000000").local_root
    assert root is not None
    Checkpoint.from_state(state(step)).to_directory(root)

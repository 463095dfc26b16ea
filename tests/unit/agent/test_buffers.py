"""The agent's snapshot buffers: which worker may use which, what they hold, and that no memory is left."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.buffers import Buffers, SnapshotMemory, limit_from_environment, warm_up
from holdfast.core.checkpoint_types import MemoryFile, Snapshot
from holdfast.core.events import Ticket
from holdfast.errors import CheckpointError, ConfigError, NotFound
from holdfast.linux.memory import available_bytes
from holdfast.worker.snapshot_buffer import HEADER_BYTES, SnapshotBuffer, grow, make_memory, new_seal, read_seal


@pytest.fixture
def buffers() -> Iterator[Buffers]:
    before = _memory_fds()
    made = Buffers(2, SnapshotMemory(1 << 20))
    yield made
    made.close()
    assert _memory_fds() == before


def _memory_fds() -> list[str]:
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [link for link in links if "holdfast-snapshot" in link]


def _write(path: str, data: bytes) -> Snapshot:
    """What a worker does."""
    memory = SnapshotBuffer.open(path)
    memory.reserve(len(data))
    memory.data[: len(data)] = data
    memory.seal = seal = new_seal()
    memory.close()
    return Snapshot(buffer=path, seal=seal, files=[MemoryFile("model", 0, len(data))])


def test_a_slot_reuses_its_two_buffers(buffers: Buffers) -> None:
    first, second = buffers.of_slot(0), buffers.of_slot(1)
    assert len({*first, *second}) == 4
    assert buffers.of_slot(0) == first
    assert buffers.limit_bytes == 1 << 19


def test_a_snapshot_is_found_under_the_name_that_it_was_committed_as(buffers: Buffers) -> None:
    snapshot = _write(buffers.of_slot(0)[0], b"weights")
    buffers.hold(Ticket(1, 5), snapshot)
    assert {path: bytes(view) for path, view in buffers.files(snapshot).items()} == {"model": b"weights"}
    assert buffers.snapshots("checkpoint_000000") == []
    buffers.release(Ticket(1, 5), "checkpoint_000000")
    assert buffers.snapshots("checkpoint_000000") == [snapshot]
    assert buffers.snapshots("checkpoint_000001") == buffers.snapshots(None) == []


def test_an_abandoned_snapshot_is_not_found(buffers: Buffers) -> None:
    snapshot = _write(buffers.of_slot(0)[0], b"weights")
    buffers.hold(Ticket(1, 5), snapshot)
    buffers.release(Ticket(1, 4), "checkpoint_000000")
    buffers.release(Ticket(1, 5), None)
    assert buffers.snapshots("checkpoint_000000") == []


def test_a_buffer_being_written_is_not_listed(buffers: Buffers) -> None:
    path = buffers.of_slot(0)[0]
    snapshot = _write(path, b"weights")
    buffers.hold(Ticket(1, 5), snapshot)
    buffers.release(Ticket(1, 5), "checkpoint_000000")
    assert buffers.is_intact(snapshot)
    _write(path, b"WEIGHTS and more" * 1000)  # it grew, too
    assert not buffers.is_intact(snapshot)
    assert buffers.describe_change(snapshot).startswith("its buffer ")
    assert buffers.snapshots("checkpoint_000000") == []


def test_a_buffer_being_uploaded_is_not_given_to_the_next_worker(buffers: Buffers) -> None:
    old = buffers.of_slot(0)
    snapshot = _write(old[1], b"weights")
    buffers.hold(Ticket(1, 5), snapshot)
    new = buffers.of_slot(0)
    assert new[0] == old[0] and new[1] != old[1]
    assert bytes(buffers.files(snapshot)["model"]) == b"weights"
    view = buffers.files(snapshot)["model"]
    buffers.release(Ticket(1, 5), "checkpoint_000000")
    assert not buffers.is_intact(snapshot)
    assert buffers.describe_change(snapshot).startswith("its buffer ")
    assert bytes(view) == b"weights"  # an upload that is still reading does no harm to itself


def test_invalid_file_tables_are_refused(buffers: Buffers) -> None:
    snapshot = _write(buffers.of_slot(0)[0], b"weights")
    buffers.hold(Ticket(1, 1), snapshot)
    beyond = Snapshot(buffer=snapshot.buffer, seal=snapshot.seal, files=[MemoryFile("model", 0, 1 << 40)])
    with pytest.raises(CheckpointError, match="beyond its buffer"):
        buffers.files(beyond)
    with pytest.raises(CheckpointError, match="no buffer"):
        buffers.hold(Ticket(1, 2), Snapshot(buffer="/dev/null", seal=1, files=[]))


def test_the_second_buffer_is_pre_faulted_if_there_is_room(buffers: Buffers) -> None:
    first, second = buffers.of_slot(0)
    snapshot = _write(first, b"x" * 100_000)
    assert buffers.to_warm_up(snapshot) is None
    assert buffers.reserve(0, HEADER_BYTES + 100_000, 2) == 2
    cold = buffers.to_warm_up(snapshot)
    assert cold is not None
    warm_up(*cold)
    assert os.stat(second).st_size >= HEADER_BYTES + 100_000  # noqa: PTH116
    assert os.stat(second).st_blocks * 512 >= 100_000  # noqa: PTH116
    assert buffers.to_warm_up(snapshot) is None
    large = _write(buffers.of_slot(1)[0], b"x" * (1 << 19))
    assert buffers.to_warm_up(large) is None


def test_a_buffer_that_is_not_pre_faulted_any_more_is_closed(buffers: Buffers) -> None:
    """The run has ended, and with it what its threads were still to do."""
    snapshot = _write(buffers.of_slot(0)[0], b"weights")
    assert buffers.reserve(0, 2 * HEADER_BYTES, 2) == 2
    before = _memory_fds()
    cold = buffers.to_warm_up(snapshot)
    assert cold is not None and len(_memory_fds()) == len(before) + 1
    del cold
    assert _memory_fds() == before


def test_the_buffers_of_all_runs_share_one_limit() -> None:
    memory = SnapshotMemory(100)
    first, second = Buffers(1, memory), Buffers(1, memory)
    first.of_slot(0), second.of_slot(0)
    assert first.reserve(0, 30, 2) == 2
    assert first.reserve(0, 20, 2) == 2  # it has them already
    assert second.reserve(0, 40, 2) == 1
    assert memory.reserved_bytes == 100
    assert second.reserve(0, 41, 2) == 0
    assert first.reserve(0, 60, 2) == 1  # the second buffer is given back for it
    assert memory.reserved_bytes == 100
    first.close()
    assert memory.reserved_bytes == 40
    assert second.reserve(0, 50, 2) == 2
    second.close()
    assert memory.reserved_bytes == 0


def test_a_worker_gets_no_more_than_its_share_of_the_limit() -> None:
    memory = SnapshotMemory(100)
    buffers = Buffers(2, memory)
    buffers.of_slot(0)
    assert [buffers.reserve(0, size, 2) for size in (51, 50, 25)] == [0, 1, 2]
    buffers.close()


def test_a_slot_that_is_not_used_any_more_gives_its_memory_back() -> None:
    memory = SnapshotMemory(1 << 20)
    buffers = Buffers(2, memory)
    slots = [buffers.of_slot(0), buffers.of_slot(1)]
    for slot in (0, 1):
        assert buffers.reserve(slot, 10_000, 2) == 2
    uploading, committed = _write(slots[1][0], b"weights"), _write(slots[1][1], b"weights")
    buffers.hold(Ticket(1, 1), committed)
    buffers.release(Ticket(1, 1), "checkpoint_000000")
    buffers.hold(Ticket(1, 2), uploading)
    buffers.free_slots(1, "checkpoint_000000")
    assert memory.reserved_bytes == 40_000
    assert buffers.is_intact(uploading) and buffers.snapshots("checkpoint_000000") == [committed]
    buffers.release(Ticket(1, 2), None)
    assert memory.reserved_bytes == 30_000
    assert buffers.snapshots("checkpoint_000000") == [committed]
    buffers.release(Ticket(2, 1), "checkpoint_000001")
    assert memory.reserved_bytes == 20_000
    buffers.close()
    assert memory.reserved_bytes == 0


def test_pre_faulting_does_not_change_contents() -> None:
    fd = make_memory("holdfast-test")
    memory = SnapshotBuffer(fd)
    memory.reserve(10_000)
    memory.data[:7] = b"weights"
    memory.seal = 7
    warm_up(SnapshotBuffer(os.dup(fd)), 50_000)
    assert (bytes(memory.data[:7]), memory.seal, memory.size_bytes) == (b"weights", 7, 50_000)
    memory.close()


def test_growing_a_buffer_does_not_shrink_one_that_was_grown_further(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = make_memory("holdfast-test")
    real = os.ftruncate

    def late(fd: int, size_bytes: int) -> None:
        real(fd, 100_000)
        real(fd, size_bytes)

    monkeypatch.setattr(os, "ftruncate", late)
    grow(fd, 50_000)
    assert os.fstat(fd).st_size == 100_000
    os.close(fd)


def test_a_mapped_buffer_cannot_shrink() -> None:
    fd = make_memory("holdfast-test")
    os.ftruncate(fd, 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)


def test_snapshot_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SNAPSHOT_LIMIT_BYTES", "1000")
    assert Buffers(4, SnapshotMemory()).limit_bytes == 250
    monkeypatch.setenv("HOLDFAST_SNAPSHOT_LIMIT_BYTES", "1 GiB")
    with pytest.raises(ConfigError, match="HOLDFAST_SNAPSHOT_LIMIT_BYTES"):
        limit_from_environment()
    monkeypatch.delenv("HOLDFAST_SNAPSHOT_LIMIT_BYTES")
    assert 0 < limit_from_environment() <= available_bytes()


def _fetched(buffers: Buffers, data: bytes, token: str) -> Snapshot:
    """What the agent does with files of other nodes."""
    path = buffers.make_room(len(data))
    assert path is not None
    snapshot = _write(path, data)
    buffers.hold_fetched(snapshot, token)
    return snapshot


def test_what_was_fetched_is_found_until_there_is_a_newer_checkpoint(buffers: Buffers) -> None:
    room = buffers.make_room(7)
    assert room is not None
    buffers.free_slots(1, None)
    snapshot = _write(room, b"weights")  # it is not closed while it is filled
    buffers.hold_fetched(snapshot, "old")
    buffers.free_slots(1, "old")
    assert buffers.snapshots("old") == [snapshot] and buffers.stored_files("old") == {"model": 7}
    buffers.hold(Ticket(2, 1), _write(buffers.of_slot(0)[0], b"newer"))
    buffers.release(Ticket(2, 1), None)
    assert buffers.snapshots("old") == [snapshot]
    buffers.hold(Ticket(2, 2), _write(buffers.of_slot(0)[0], b"newer"))
    buffers.release(Ticket(2, 2), "new")
    assert buffers.snapshots("old") == []


def test_memory_for_what_is_fetched_is_limited_and_given_to_workers_that_need_it() -> None:
    memory = SnapshotMemory(3 * HEADER_BYTES + 3000)
    buffers = Buffers(1, memory)
    try:
        buffers.of_slot(0)
        assert buffers.make_room(4 * HEADER_BYTES) is None
        room = buffers.make_room(1000)
        assert room is not None
        buffers.drop(room)
        assert memory.reserved_bytes == 0
        _fetched(buffers, b"x" * 2000, "t")
        assert buffers.reserve(0, HEADER_BYTES + 100, 2) == 2
        assert buffers.stored_files("t"), "there is room for both"
        assert buffers.reserve(0, HEADER_BYTES + 1000, 2) == 2
        assert buffers.stored_files("t") == {}
        _fetched(buffers, b"x" * 10, "t")
        assert buffers.reserve(0, 10 * HEADER_BYTES, 1) == 0
        assert buffers.stored_files("t"), "no memory is enough for that, so nothing is given up"
    finally:
        buffers.close()
    assert memory.reserved_bytes == 0


def test_a_buffer_that_cannot_be_made_reserves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    memory = SnapshotMemory(1 << 20)
    monkeypatch.setattr("holdfast.agent.buffers.make_memory", refuse)
    with pytest.raises(OSError, match="Too many"):
        Buffers(1, memory).make_room(1000)
    assert memory.reserved_bytes == 0


def test_a_seal_that_was_written_over_is_told_from_a_newer_snapshot(buffers: Buffers) -> None:
    paths = buffers.of_slot(0)
    snapshot = _write(paths[0], b"weights")
    buffers.hold(Ticket(1, 5), snapshot)
    memory = SnapshotBuffer.open(paths[0])
    memory.seal = 1
    assert buffers.describe_change(snapshot) == "its buffer has another seal"
    memory.close()
    buffers.hold(Ticket(1, 6), _write(paths[0], b"newer"))
    assert buffers.describe_change(snapshot) == "its buffer has the one of report 6 of generation 1"


def test_a_file_for_another_node_is_opened_with_the_seal_it_must_keep(buffers: Buffers) -> None:
    path = buffers.of_slot(0)[0]
    buffers.hold(Ticket(1, 5), _write(path, b"weights"))
    with pytest.raises(NotFound):
        buffers.open_file("t", "model")
    buffers.release(Ticket(1, 5), "t")
    fd, start, size_bytes, seal = buffers.open_file("t", "model")
    try:
        assert os.pread(fd, size_bytes, start) == b"weights" and read_seal(fd) == seal
        _write(path, b"WEIGHTS")
        assert read_seal(fd) != seal
    finally:
        os.close(fd)
    for token, name in (("t", "model"), ("", "model"), ("t", "other")):
        with pytest.raises(NotFound):
            buffers.open_file(token, name)

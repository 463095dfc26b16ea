"""Agents that do not see the run's storage start workers from what other agents have in memory; the head's storage is
read for what is not there, or not as it was committed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.faults.agent_harness import AgentHarness, job_of, run_async, started_agent
from tests.faults.programs import processes

from holdfast import train
from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reserve import reserve
from holdfast.core.commands import AnnounceCheckpoint, Neighbour
from holdfast.core.events import AgentPrepared, Ticket
from holdfast.storage.posix.store import PosixStore
from holdfast.streaming import messages as m
from holdfast.streaming.connection import Connection
from holdfast.streaming.served_files import OpenedFile, ServedDirectory
from holdfast.streaming.server import Settings, StorageServer
from holdfast.wire.messages import StorageProbe, StorageServed, StorageUnseen, Upload, Uploaded

pytestmark = pytest.mark.timeout(240)

_COUNT = 600_000
_KEY = "of the run"


def _value(step: int) -> float:
    return float(numpy.arange(_COUNT, dtype="f8").sum() + step)


def _train() -> float:
    """Leave a state with the agent, or give back what a state came to."""
    found = train.get_checkpoint()
    if found is not None:
        state = found.load_state()
        return float(state["weights"].sum() + state["step"])
    state = {"weights": numpy.arange(_COUNT, dtype="f8"), "step": 7}
    train.report({}, checkpoint=train.Checkpoint.from_state(state))
    signal.pause()
    raise AssertionError


def _report_directory() -> str:
    found = train.get_checkpoint()
    if found is not None:
        with found.as_directory() as directory:
            return Path(directory, "state.json").read_text()
    reported = Path("reported").absolute()
    reported.mkdir()
    Path(reported, "state.json").write_text("mine")
    train.report({}, checkpoint=train.Checkpoint.from_directory(reported))
    signal.pause()
    raise AssertionError


class _CountingDirectory(ServedDirectory):
    """The head's storage: which files are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def open(self, request: m.Read) -> OpenedFile:
        self.read.append(os.fsdecode(request.key).rpartition("/")[2])
        return super().open(request)

    @property
    def state_files(self) -> set[str]:
        """Those of the state that were read."""
        return {name for name in self.read if not name.startswith(".")}


class _Head:
    """The driver's machine: storage, a server of it, and a checkpoint that agent `a` has given."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = root / "run"
        self.run.mkdir(parents=True)
        self.files = _CountingDirectory(root)
        self.server = StorageServer(Settings(key="head", hosts=["127.0.0.1"]), self.files)
        self.manifest: Manifest

    async def prepare(self, agent: AgentHarness, job: bytes) -> int:
        """Prepare the run on an agent that does not see the storage; gives the port of its memory."""
        probe = StorageProbe(root=str(self.root), file=str(self.root / "absent"), text="x")
        agent.send_prepare(job, storage=str(self.run), probe=probe, snapshot_key=_KEY)
        await agent.expect(StorageUnseen)
        agent.send(StorageServed(root=str(self.root), port=self.server.port, key="head"))
        return (await agent.expect(AgentPrepared)).snapshot_port

    async def commit(self, agent: AgentHarness) -> None:
        """Have the agent store what its only worker has reported, and commit it."""
        store = PosixStore(self.run)
        draft = reserve(store)
        agent.send(Upload(ticket=Ticket(1, 1), rank=0, draft=draft))
        stored = await agent.expect(Uploaded)
        self.manifest = commit(store, draft, stored.files)
        agent.send(AnnounceCheckpoint(ticket=Ticket(1, 1), name=draft.name, token=draft.token))
        self.files.read.clear()

    def start(self, agent: AgentHarness, *ports: int, **changes: Any) -> None:
        """Start workers of a second generation, with neighbours at these ports."""
        neighbours = tuple(Neighbour(agent=f"n{port}", address="127.0.0.1", port=port) for port in ports)
        name, token = self.manifest.name, self.manifest.token
        given = {"generation": 2, "checkpoint": name, "token": token, "neighbours": neighbours, **changes}
        agent.start(**given)


@asynccontextmanager
async def _two_agents(
    tmp_path: Path, function: Callable[[], Any] = _train
) -> AsyncIterator[tuple[_Head, AgentHarness, AgentHarness, int]]:
    """The head, an agent that holds a committed checkpoint, another one, and the first one's port."""
    head = _Head(tmp_path / "head")
    try:
        async with started_agent(tmp_path / "a") as a, started_agent(tmp_path / "b") as b:
            job = job_of(function)
            port = await head.prepare(a, job)
            await head.prepare(b, job)
            await a.started()
            await a.expect_report()
            await head.commit(a)
            yield head, a, b, port
    finally:
        head.server.close()


def _test(tmp_path: Path, body: Callable[[_Head, AgentHarness, AgentHarness, int], Awaitable[None]]) -> None:
    async def test() -> None:
        async with _two_agents(tmp_path) as (head, a, b, port):
            await body(head, a, b, port)

    run_async(test)


def _snapshots_of(agent: AgentHarness) -> list[Path]:
    """The buffers of an agent that hold something."""
    found: dict[int, Path] = {}
    for fd in Path(f"/proc/{agent.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if "holdfast-snapshot" in str(fd.readlink()) and fd.stat().st_size:
                found[fd.stat().st_ino] = fd
    return list(found.values())


def test_what_a_neighbour_has_in_memory_is_not_read_from_the_head(tmp_path: Path) -> None:
    async def body(head: _Head, a: AgentHarness, b: AgentHarness, port: int) -> None:
        head.start(b, port)
        assert (await b.finished()).value == _value(7)
        assert head.files.state_files == set()
        await b.expect_line("is in memory here: 4.8 MB from n")
        assert len(_snapshots_of(b)) == 1, "it is kept, for what starts from there next"
        head.start(a, port)  # what is in an agent's own memory is fetched from nowhere
        assert (await a.finished()).value == _value(7)
        assert head.files.state_files == set()

    _test(tmp_path, body)


def test_an_agent_that_fetched_a_state_gives_it_to_others(tmp_path: Path) -> None:
    async def test() -> None:
        async with _two_agents(tmp_path) as (head, a, b, port), started_agent(tmp_path / "c") as c:
            own = await head.prepare(c, job_of(_train))
            head.start(c, port)
            assert (await c.finished()).value == _value(7)
            os.kill(a.process.pid, signal.SIGKILL)
            await a.agent_ended()
            head.start(b, port, own)
            assert (await b.finished()).value == _value(7)
            assert head.files.state_files == set()

    run_async(test)


def test_a_neighbours_memory_that_was_written_to_is_not_taken(tmp_path: Path) -> None:
    async def body(head: _Head, a: AgentHarness, b: AgentHarness, port: int) -> None:
        for path in _snapshots_of(a):
            with path.open("r+b") as memory:
                memory.seek(path.stat().st_size // 2)
                memory.write(b"x" * 50)  # its seal is as it was
        head.start(b, port)
        assert (await b.finished()).value == _value(7)
        assert head.files.state_files, "storage has it as it was committed"
        await b.expect_line("holds other bytes than were committed")

    _test(tmp_path, body)


def test_a_buffer_that_was_used_again_is_not_given(tmp_path: Path) -> None:
    async def body(head: _Head, a: AgentHarness, b: AgentHarness, port: int) -> None:
        for path in _snapshots_of(a):
            with path.open("r+b") as memory:
                memory.write(bytes(8))  # a worker breaks the seal before it writes
        head.start(b, port)
        assert (await b.finished()).value == _value(7)
        assert head.files.state_files

    _test(tmp_path, body)


def test_memory_of_another_checkpoint_is_not_given(tmp_path: Path) -> None:
    async def body(head: _Head, a: AgentHarness, b: AgentHarness, port: int) -> None:
        store = PosixStore(head.run)
        draft = reserve(store)
        for entry in head.manifest.files:
            store.copy(f"{head.manifest.name}/{entry.path}", f"{draft.name}/{entry.path}")
        other = commit(store, draft, head.manifest.files)
        head.start(b, port, checkpoint=other.name, token=other.token)
        assert (await b.finished()).value == _value(7)
        assert head.files.state_files, "the neighbour knows this token as little as one that has a newer checkpoint"

    _test(tmp_path, body)


def test_a_neighbour_that_does_not_know_the_runs_key_gets_nothing(tmp_path: Path) -> None:
    async def body(head: _Head, a: AgentHarness, b: AgentHarness, port: int) -> None:
        probe = StorageProbe(root=str(head.root), file=str(head.root / "absent"), text="x")
        b.send_prepare(job_of(_train), storage=str(head.run), probe=probe, snapshot_key="another")
        await b.expect(StorageUnseen)
        b.send(StorageServed(root=str(head.root), port=head.server.port, key="head"))
        await b.expect(AgentPrepared)
        head.start(b, port)
        assert (await b.finished()).value == _value(7)
        assert head.files.state_files
        await b.expect_line("serves another run")

    _test(tmp_path, body)


def test_without_memory_for_it_the_state_is_read_from_the_head(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            _two_agents(tmp_path) as (head, _, _, port),
            started_agent(tmp_path / "c", HOLDFAST_SNAPSHOT_LIMIT_BYTES="1000000") as c,
        ):
            await head.prepare(c, job_of(_train))
            head.start(c, port)
            assert (await c.finished()).value == _value(7)
            assert head.files.state_files and _snapshots_of(c) == []

    run_async(test)


def test_a_reported_directory_is_asked_of_nobody_in_vain(tmp_path: Path) -> None:
    """What it looks like: one of its files is called as that of a state."""

    async def test() -> None:
        async with _two_agents(tmp_path, _report_directory) as (head, _, b, port):
            head.start(b, port)
            assert (await b.finished()).value == "mine"
            assert head.files.state_files == {"state.json"}

    run_async(test)


def test_a_neighbour_that_dies_while_it_is_asked_costs_nothing_but_the_way_to_the_head(tmp_path: Path) -> None:
    async def body(head: _Head, a: AgentHarness, b: AgentHarness, port: int) -> None:
        os.kill(a.process.pid, signal.SIGSTOP)
        head.start(b, port)
        connected = _is_connected_to(port)
        await asyncio.to_thread(processes.wait_until, connected, "the neighbour is asked")
        os.kill(a.process.pid, signal.SIGKILL)
        assert (await b.finished()).value == _value(7)
        assert head.files.state_files

    _test(tmp_path, body)


def _is_connected_to(port: int) -> Callable[[], bool]:
    """Whether somebody has connected to this port of loopback; the kernel does that for a process that is stopped."""
    peer = f"0100007F:{port:04X} 01 "  # remote address, ESTABLISHED

    def is_connected() -> bool:
        return any(peer in line for line in Path("/proc/net/tcp").read_text().splitlines())

    return is_connected


class _DyingDirectory(_CountingDirectory):
    """A neighbour whose connections end in each large file; stuck ones do so when the test wants it."""

    def __init__(self, root: Path, prefix: str, *, is_stuck: bool = False) -> None:
        super().__init__(root)
        self._prefix = prefix
        self.go_on = threading.Event()
        if not is_stuck:
            self.go_on.set()

    def answer(self, connection: Connection, request: m.Request) -> Any:
        assert isinstance(request, m.List)
        token = os.fsdecode(request.prefix)
        files = [path for path in (self._root / self._prefix).iterdir() if not path.name.startswith(".")]
        return [(os.fsencode(f"{token}/{path.name}"), path.stat().st_size) for path in files]

    def open(self, request: m.Read) -> OpenedFile:
        name = os.fsdecode(request.key).rpartition("/")[2]
        opened = super().open(m.Read(key=os.fsencode(f"{self._prefix}/{name}")))
        if opened.size_bytes < 1_000_000:
            return opened
        self.go_on.wait(100)
        opened.close()
        reading, writing = os.pipe()
        os.close(writing)
        return OpenedFile(reading, 0, opened.size_bytes)  # the length is sent, and then the connection breaks


def test_a_neighbour_that_breaks_off_in_a_file_is_followed_by_the_next_one(tmp_path: Path) -> None:
    async def body(head: _Head, a: AgentHarness, b: AgentHarness, port: int) -> None:
        broken = _DyingDirectory(head.root, f"run/{head.manifest.name}")
        server = StorageServer(Settings(key=_KEY, hosts=["127.0.0.1"]), broken)
        try:
            head.start(b, server.port, port)
            assert (await b.finished()).value == _value(7)
            assert "state.safetensors" in broken.read
            assert head.files.state_files == set()
        finally:
            server.close()

    _test(tmp_path, body)


def test_a_generation_that_is_stopped_does_not_wait_for_a_neighbour_that_is_stuck(tmp_path: Path) -> None:
    async def body(head: _Head, a: AgentHarness, b: AgentHarness, port: int) -> None:
        stuck = _DyingDirectory(head.root, f"run/{head.manifest.name}", is_stuck=True)
        server = StorageServer(Settings(key=_KEY, hosts=["127.0.0.1"]), stuck)
        try:
            head.start(b, server.port)
            await asyncio.to_thread(processes.wait_until, lambda: "state.safetensors" in stuck.read, "it is asked")
            assert len(_snapshots_of(b)) == 1
            await b.stop(generation=2)
            stuck.go_on.set()
            await asyncio.to_thread(processes.wait_until, lambda: not _snapshots_of(b), "its memory is given back")
            head.start(b, port, generation=3)
            assert (await b.finished()).value == _value(7)
            assert head.files.state_files == set()
        finally:
            stuck.go_on.set()
            server.close()

    _test(tmp_path, body)


def test_an_agent_ends_its_server_with_the_run(tmp_path: Path) -> None:
    from holdfast.wire.messages import CloseRun, RunClosed

    async def body(head: _Head, a: AgentHarness, b: AgentHarness, port: int) -> None:
        socket.create_connection(("127.0.0.1", port)).close()
        a.send(CloseRun(flush_s=0.0))
        await a.expect(RunClosed)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    _test(tmp_path, body)

"""A minimal controller for tests: it starts a real agent, sends it messages, and records the answers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import msgspec
from blake3 import blake3
from tests.faults.programs import processes

from holdfast.core.checkpoint_types import Report
from holdfast.core.commands import Place, StartWorkers, StopWorkers
from holdfast.core.events import (
    AgentJoined,
    AgentPrepared,
    RankReported,
    WorkerExited,
    WorkerFinished,
    WorkersStarted,
    WorkersStopped,
)
from holdfast.core.records import WorkerFailure
from holdfast.storage.run_secret import make_secret
from holdfast.wire.channel import Channel, Server, serve
from holdfast.wire.messages import AgentMessage, Logs, PrepareFunction, PrepareRun
from holdfast.wire.resumable_channel import ResumableChannel, read_opening
from holdfast.worker.job import Framework, Job

__all__ = ["RUN", "AgentHarness", "job_of", "open_channel", "run_async", "started_agent", "wait_gone"]

M = TypeVar("M")
RUN = "run-1"
"""The run of tests that have one only."""
_LINE_CHARS = 500


class AgentHarness:
    """One agent and all its messages. `expect` waits for a message; earlier ones stay and can be expected later."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.storage = directory / "storage" / "run"
        self.cache = directory / "cache"
        self.messages: list[AgentMessage] = []
        self._runs: dict[int, str] = {}
        """The run of each message, by its id()."""
        self.logs: list[Logs] = []
        self.reports: list[Report] = []
        self._changed = asyncio.Condition()
        self._joined = asyncio.Event()
        self._left = asyncio.Event()
        self._secret = make_secret()
        self._server: Server
        self._channel: ResumableChannel[AgentMessage]
        self.process: subprocess.Popen[bytes]
        self.master_port = 0
        self.silence_s = 30.0

    async def listen(self, port: int = 0) -> int:
        """Where the agent connects to."""
        self._server = await serve("127.0.0.1", port, self._secret, self._accept)
        return self._server.port

    def options(self) -> list[str]:
        """What the agent is told besides its name and where to connect."""
        return ["--parent-pid", str(os.getpid())]

    async def open(self, **environment: str) -> None:
        self.port = await self.listen()
        self.directory.mkdir(parents=True, exist_ok=True)
        arguments = ["--connect", f"127.0.0.1:{self.port}", "--agent-id", "a1", "--slots", "4", *self.options()]
        token_file = self.directory / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(self._secret)
        arguments += ["--token-file", str(token_file)]
        self.process = self.launch(
            [sys.executable, "-m", "holdfast.agent", *arguments],
            {**os.environ, "HOLDFAST_LOCAL_CACHE_DIR": str(self.cache), **environment},
        )
        self.hello = await self.expect(AgentJoined)

    def launch(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start the agent. It dies with the thread that calls this."""
        return subprocess.Popen(command, env=environment)

    async def _accept(self, channel: Channel[AgentMessage]) -> None:
        self._channel = await open_channel(channel, self.silence_s)
        await self._receive()
        self._left.set()

    async def _receive(self) -> None:
        while (envelope := await self._channel.recv()) is not None:
            message = envelope.message
            async with self._changed:
                if isinstance(message, Logs):
                    self.logs.append(message)
                elif isinstance(message, RankReported):
                    self.reports += message.reports
                if isinstance(message, WorkersStopped | AgentPrepared):
                    self.master_port = message.master_port
                self._runs[id(message)] = envelope.run
                self.messages.append(message)
                self._changed.notify_all()

    async def expect(self, kind: type[M], *, run: str | None = None, **fields: Any) -> M:
        """Wait for the first message of this kind with these fields, of this run or of any, and remove it from
        `messages`."""

        def fits(message: Any) -> bool:
            if not isinstance(message, kind) or (run is not None and self._runs[id(message)] != run):
                return False
            return all(getattr(message, k) == v for k, v in fields.items())

        found = await self._expect(fits)
        assert isinstance(found, kind)
        return found

    async def _expect(self, fits: Callable[[AgentMessage], bool]) -> AgentMessage:
        async with self._changed:
            await self._changed.wait_for(lambda: any(map(fits, self.messages)))
            at = next(i for i, message in enumerate(self.messages) if fits(message))
            return self.messages.pop(at)

    async def expect_report(self, count: int = 1) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.reports) >= count)

    async def expect_line(self, text: str) -> None:
        """Until a worker has printed `text`."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(text in line.text for logs in self.logs for line in logs.lines))

    async def expect_more_logs(self) -> None:
        async with self._changed:
            seen = len(self.logs)
            await self._changed.wait_for(lambda: len(self.logs) > seen)

    def send(self, message: Any, run: str = RUN) -> None:
        self._channel.send_nowait(message, run)

    def send_prepare(self, job: bytes, run: str = RUN, **changes: Any) -> str:
        """Send the function and the run, with these changes to either; gives the function's key."""
        function: dict[str, Any] = {"function": job, "sys_path": sys.path, "environment": {}}
        storage = self.storage if run == RUN else self.storage.with_name(run)
        prepare: dict[str, Any] = {
            "storage": str(storage),
            "experiment": "exp",
            "trial_id": "t1",
            "trial_dir": str(storage),
            "work_dir": str(self.directory / "work"),
            "max_restarts": 3,
        }
        for name, value in changes.items():
            (function if name in PrepareFunction.__struct_fields__ else prepare)[name] = value
        key = blake3(msgspec.msgpack.encode(function)).hexdigest()
        self.send(PrepareFunction(key=key, **function))
        self.send(PrepareRun(function_key=key, **prepare), run)
        return key

    async def prepare(self, job: bytes, run: str = RUN, **changes: Any) -> AgentPrepared:
        self.send_prepare(job, run, **changes)
        return await self.expect(AgentPrepared, run=run)

    def start(self, generation: int = 1, ranks: int = 1, run: str = RUN, **changes: Any) -> None:
        places = (Place(agent="a1", node_rank=0, ranks=tuple(range(ranks))),)
        self.send(
            StartWorkers(
                generation=generation,
                world_size=ranks,
                node_count=1,
                restart_count=generation - 1,
                master_address="127.0.0.1",
                master_port=self.master_port,
                **{"checkpoint": None, "iteration": 0, "places": places, **changes},
            ),
            run,
        )

    async def started(self, generation: int = 1, ranks: int = 1, run: str = RUN, **changes: Any) -> dict[int, int]:
        self.start(generation, ranks, run, **changes)
        return (await self.expect(WorkersStarted, run=run, generation=generation)).pids

    async def stop(self, generation: int = 1, run: str = RUN, **changes: Any) -> WorkersStopped:
        self.send(StopWorkers(generation=generation, **changes), run)
        return await self.expect(WorkersStopped, run=run, generation=generation)

    async def finished(self, rank: int = 0) -> WorkerFinished:
        ended = await self._expect(lambda one: _ended_rank(one) == rank)
        assert isinstance(ended, WorkerFinished), ended
        return ended

    async def exited(self, rank: int = 0) -> WorkerFailure:
        """How the rank failed."""
        ended = await self._expect(lambda one: isinstance(one, WorkerExited) and one.failure.rank == rank)
        assert isinstance(ended, WorkerExited)
        return ended.failure

    async def disconnect(self) -> None:
        """Cut the connection, as a killed controller would."""
        self._channel.abort()
        await self._left.wait()

    async def agent_ended(self) -> int:
        return await asyncio.get_running_loop().run_in_executor(None, self.process.wait)

    async def close(self) -> None:
        await self._server.close()
        await self.agent_ended()

    def zygote(self) -> int:
        """The zygote's pid; between two generations another process may replace it."""
        found: list[int] = []

        def is_one() -> bool:
            found[:] = processes.children(self.process.pid)
            return len(found) == 1

        processes.wait_until(is_one, "one zygote")
        return found[0]

    def diagnostics(self) -> str:
        """The agent's messages and the state of its processes, for the error of a test that timed out."""
        others = [message for message in self.messages if not isinstance(message, Logs | RankReported)]
        messages = [f"message: {message!r}"[:_LINE_CHARS] for message in others]
        lines = [f"log: rank {line.rank} {line.stream}: {line.text}" for logs in self.logs for line in logs.lines]
        pids = [self.process.pid, *processes.descendants(self.process.pid)]
        return "\n".join([*messages, *lines, f"{len(self.reports)} reports", *map(processes.describe, pids)])

    def leftovers(self) -> list[Path]:
        """The files in the agent's part of the cache."""
        return sorted(self.cache.glob("agents/*"))


async def open_channel(channel: Channel[AgentMessage], silence_s: float = 30.0) -> ResumableChannel[AgentMessage]:
    """Accept an agent that has connected for the first time."""
    opening = await read_opening(channel)
    assert opening is not None and opening.received is None
    resumable = ResumableChannel[AgentMessage](channel.agent, opening.incarnation, comes_back=opening.comes_back)
    resumable.accept(channel, opening, silence_s)
    return resumable


def _ended_rank(message: AgentMessage) -> int | None:
    """The rank that a message reports as ended."""
    match message:
        case WorkerFinished(rank=rank) | WorkerExited(failure=WorkerFailure(rank=rank)):
            return rank
        case _:
            return None


@asynccontextmanager
async def started_agent(directory: Path | AgentHarness, **environment: str) -> AsyncIterator[AgentHarness]:
    """Start the agent of a harness, which is made in a directory unless it is given; it ends with the block."""
    harness = directory if isinstance(directory, AgentHarness) else AgentHarness(directory)
    await harness.open(**environment)
    try:
        yield harness
    except (AssertionError, asyncio.CancelledError):
        print(harness.diagnostics(), file=sys.stderr)  # pytest shows it with the failure
        raise
    finally:
        with suppress(ProcessLookupError):
            harness.process.send_signal(signal.SIGCONT)
        await harness.close()


def run_async(test: Callable[[], Awaitable[None]]) -> None:
    """Run an asynchronous test; the limit is far beyond what any of them needs."""

    async def bounded() -> None:
        async with asyncio.timeout(240):
            await test()

    asyncio.run(bounded())


def job_of(
    function: Callable[..., Any], config: dict[str, Any] | None = None, framework: Framework | None = None
) -> bytes:
    """The job as a controller would send it; functions of test modules travel by value, like those of a script."""
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(Job(function, config, config is not None, framework)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


async def wait_gone(*pids: int) -> None:
    """Wait until none of these processes runs any more."""
    await asyncio.get_running_loop().run_in_executor(None, processes.wait_gone, *pids)

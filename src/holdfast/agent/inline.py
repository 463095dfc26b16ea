"""A worker inside the calling process, for local mode: breakpoints work, output is the terminal's, and nothing
is forked.

The agent's loop runs in a thread of its own; `run_in_main` hands the training function to the user's main
thread. It cannot be killed there: clearing cuts its line, so that its next report raises.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from holdfast.agent.function_memory import FunctionMemory
from holdfast.agent.spawner import Parent
from holdfast.wire.messages import PrepareRun
from holdfast.worker.bootstrap import run_inline
from holdfast.worker.job import Assignment, Job
from holdfast.worker.stdio import WorkerFds
from holdfast.worker.torchrun import Torchrun

__all__ = ["InlineSpawner", "InlineSpawners", "RunInMain"]

RunInMain = Callable[[Callable[[], None]], None]
"""Queues a call for the main thread; must not wait for it."""


class InlineSpawner:
    """A `Spawner` of one worker that is no process. `job` is the user's own, never pickled."""

    def __init__(self, parent: Parent, job: Job, run_in_main: RunInMain, torchrun: Torchrun | None = None) -> None:
        self._parent = parent
        self._job = job
        self._run_in_main = run_in_main
        self._torchrun = torchrun
        self._environment: dict[str, str] | None = None
        self._connection: socket.socket | None = None
        self._was_cut = False
        self._ended = asyncio.Event()
        self._ended.set()

    async def prepare(self, function: FunctionMemory, order: PrepareRun) -> str | None:
        self._environment = function.order.environment
        return None

    async def ready(self) -> None:
        await self._ended.wait()

    def spawn(self, assignment: Assignment, worker_fds: WorkerFds) -> None:
        assert self._ended.is_set(), "local mode runs one worker"
        assert self._environment is not None
        job, environment, torchrun = self._job, self._environment, self._torchrun
        loop = asyncio.get_running_loop()
        for fd in (worker_fds.stdout, worker_fds.stderr, worker_fds.dump):
            os.close(fd)
        connection = socket.socket(fileno=worker_fds.connection)
        self._connection = connection
        self._was_cut = False
        self._ended.clear()

        def work() -> None:
            code = 1
            try:
                with suppress(BrokenPipeError, ConnectionResetError):  # cut by `clear`: nobody listens to its end
                    code = run_inline(job, environment, assignment, connection, worker_fds.listen, torchrun)
            finally:
                loop.call_soon_threadsafe(self._done, assignment, code)

        self._parent.worker_started(assignment.generation, assignment.rank, os.getpid())
        self._run_in_main(work)

    async def clear(self, generation: int) -> None:
        self.cut()
        await self._ended.wait()

    def add_imports(self, modules: list[str]) -> None:
        """There is no zygote that could import them."""

    def release(self) -> None:
        """Nothing is held."""

    def cut(self) -> None:
        if self._connection is not None:
            self._was_cut = True
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _done(self, assignment: Assignment, code: int) -> None:
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self._ended.set()
        self._parent.worker_died(assignment.generation, assignment.rank, code << 8, killed=self._was_cut)


class InlineSpawners:
    """For the only run that local mode has."""

    def __init__(self, job: Job, run_in_main: RunInMain, torchrun: Torchrun | None = None) -> None:
        self._job = job
        self._run_in_main = run_in_main
        self._torchrun = torchrun
        self._spawners: list[InlineSpawner] = []

    def spawner(self, run: str, parent: Parent) -> InlineSpawner:
        self._spawners.append(InlineSpawner(parent, self._job, self._run_in_main, self._torchrun))
        return self._spawners[-1]

    async def close(self) -> None:
        for spawner in self._spawners:
            spawner.cut()

"""The interface between an agent and what starts, watches and kills its workers' processes.

Three ways: forked from a warm zygote or started cold (`zygote_client` does both), or run inside the calling process
(`inline`, for local mode). `agent` and `generation` know only what is written here.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.wire.messages import Prepare
from holdfast.worker.job import Assignment
from holdfast.worker.stdio import WorkerFds

__all__ = ["Parent", "Spawner"]


class Parent(Protocol):
    """Whom a spawner calls back, in the agent's event loop."""

    def worker_started(self, generation: int, rank: int, pid: int) -> None: ...

    def worker_died(self, generation: int, rank: int, status: int, *, killed: bool) -> None:
        """The process is gone and reaped; `status` as of wait(2). `killed`: by `clear`, not by its own fault."""
        ...

    def workers_lost(self, why: str) -> None:
        """The zygote died, and the workers with it; how each of them ended is unknown."""
        ...

    def spawner_output(self, text: str) -> None:
        """Something for the log: output of imports, reasons for cold starts."""
        ...


class Spawner(Protocol):
    """Starts and ends workers. Used from one event loop."""

    async def prepare(self, prepare: Prepare, function_fd: int) -> str | None:
        """Get ready for this job, replacing any earlier one; returns why workers will be started cold, or None.
        The memory behind `function_fd` holds the pickled function; the descriptor stays the caller's, and open."""
        ...

    async def ready(self) -> None:
        """Returns when `spawn` can start workers without a wait."""
        ...

    def spawn(self, assignment: Assignment, worker_fds: WorkerFds) -> None:
        """Start one worker; the descriptors are this method's to close."""
        ...

    async def clear(self, generation: int) -> None:
        """Kill every worker and all that they started; returns when nothing of them is left."""
        ...

    def add_imports(self, modules: list[str]) -> None:
        """Workers imported these by themselves."""
        ...

    async def close(self) -> None:
        """Kill everything at once. Closing twice is fine."""
        ...

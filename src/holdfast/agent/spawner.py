"""The interface between a run host and what starts, watches and kills its workers' processes.

Three ways: forked from a warm zygote or started cold (`zygote_client` does both), or run inside the calling process
(`inline`, for local mode). `run_host` and `worker_group` know only what is written here.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.agent.function_memory import FunctionMemory
from holdfast.errors import HoldfastError
from holdfast.wire.messages import PrepareRun
from holdfast.worker.job import Assignment
from holdfast.worker.stdio import WorkerFds

__all__ = ["Parent", "SpawnError", "Spawner", "Spawners"]


class SpawnError(HoldfastError):
    """No worker can be started for this run."""


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
    """Starts and ends the workers of one run. Used from one event loop."""

    async def prepare(self, function: FunctionMemory, order: PrepareRun) -> str | None:
        """Get ready for this job, replacing any earlier one; returns why workers will be started cold, or None. The
        memory of the function stays the caller's, and open."""
        ...

    async def ready(self) -> None:
        """Returns when `spawn` can start workers without a wait; raises `SpawnError` if it cannot start any. After a
        `prepare` that raised that, it tries again."""
        ...

    def spawn(self, assignment: Assignment, worker_fds: WorkerFds) -> None:
        """Start one worker; the descriptors are this method's to close."""
        ...

    async def clear(self, generation: int) -> None:
        """Kill every worker of the run and all that they started; returns when nothing of them is left."""
        ...

    def add_imports(self, modules: list[str]) -> None:
        """Workers imported these by themselves."""
        ...

    def release(self) -> None:
        """The run is over, and its workers are gone."""
        ...


class Spawners(Protocol):
    """What the spawners of all runs of an agent share."""

    def spawner(self, run: str, parent: Parent) -> Spawner: ...

    async def close(self) -> None:
        """Kill all workers of all runs at once. Closing twice is fine."""
        ...

"""Local mode's engine: one agent on the hub's own event loop, whose only worker runs in the caller's thread.

For `ScalingConfig(num_workers=0)`: breakpoints and profilers work in the training function, and everything else is as
usual: the same controller, wire, commits and journal.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence

from holdfast.agent.agent import Agent
from holdfast.agent.inline import InlineSpawners, RunInMain
from holdfast.agent.platform import Platform
from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase
from holdfast.engines.engine import AgentChange, ControllerEndpoint, OnChange
from holdfast.worker.job import Job
from holdfast.worker.torchrun import Torchrun

__all__ = ["InlineEngine"]

_numbers = itertools.count()


class InlineEngine:
    """Starts the only agent that there can be."""

    def __init__(
        self,
        endpoint: ControllerEndpoint,
        on_change: OnChange,
        job: Job,
        run_in_main: RunInMain,
        torchrun: Torchrun | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._on_change = on_change
        self._job = job
        self._run_in_main = run_in_main
        self._torchrun = torchrun
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def want(self, gangs: Sequence[Gang]) -> None:
        if gangs and not self._tasks:
            self._start(f"inline-{os.getpid()}-{next(_numbers)}")

    def knows(self, agent: str) -> bool:
        return agent in self._tasks

    def abandon(self, agent: str) -> None:
        """There can be no other."""

    def kill(self, agent: str) -> None:
        if (task := self._tasks.get(agent)) is not None:
            task.cancel()

    async def close(self, flush_s: float) -> None:
        """The agent ends by itself when the controller tells it to; it waits for the user's function."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _start(self, agent: str) -> None:
        platform = Platform(
            self._endpoint.address,
            self._endpoint.secret,
            spawners=InlineSpawners(self._job, self._run_in_main, self._torchrun),
        )
        task = self._tasks[agent] = asyncio.get_running_loop().create_task(Agent(agent, 1, platform).run())
        task.add_done_callback(lambda task: self._ended(agent, task))
        self._on_change(AgentChange(agent, AgentPhase.PENDING))

    def _ended(self, agent: str, task: asyncio.Task[None]) -> None:
        del self._tasks[agent]
        self._on_change(AgentChange(agent, AgentPhase.GONE, _why(task)))


def _why(task: asyncio.Task[None]) -> str:
    if task.cancelled():
        return "it was cancelled"
    error = task.exception()
    return "it ended" if error is None else f"it failed: {error}"

"""The embedded engine: agents as child processes on this machine.

One agent is the rule; several stand in for nodes. An agent dies with the controller's process (by its parent death
signal, and because its connection closes), and its death is noticed at once, through a pidfd.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase
from holdfast.engines.agent_process import exit_phrase, secret_pipe
from holdfast.engines.driver_fork import ForkedAgent
from holdfast.engines.engine import AgentChange, ControllerEndpoint, OnChange
from holdfast.storage.run_secret import SECRET_VARIABLE
from holdfast.worker.environment import RUN_VARIABLE

__all__ = ["LocalEngine"]

_numbers = itertools.count()
_GRACE_S = 3.0
"""How long an agent may take to end, besides the time for storing logs and artifacts."""


class _Process(NamedTuple):
    process: subprocess.Popen[bytes] | ForkedAgent
    pidfd: int
    ended: asyncio.Event


class LocalEngine:
    """Starts `python -m holdfast.agent` processes; the first may have been forked from the driver already."""

    def __init__(self, endpoint: ControllerEndpoint, on_change: OnChange, forked: ForkedAgent | None = None) -> None:
        """`forked` is to be the first agent."""
        self._forked = forked
        self._endpoint = endpoint
        self._on_change = on_change
        self._running: dict[str, _Process] = {}
        self._abandoned: set[str] = set()

    def want(self, gangs: Sequence[Gang]) -> None:
        """As many agents as the most spread gang needs: on one machine an agent holds any number of workers."""
        agents = [
            max(gang.local_agents, -(-gang.workers // (gang.workers_per_agent or gang.workers)) + gang.spares)
            for gang in gangs
        ]
        count = max(agents, default=0)
        while len(self._running.keys() - self._abandoned) < count:
            self._start(f"local-{os.getpid()}-{next(_numbers)}")

    def knows(self, agent: str) -> bool:
        return agent in self._running

    def abandon(self, agent: str) -> None:
        if agent in self._running:
            self._abandoned.add(agent)

    def _start(self, agent: str) -> None:
        arguments = ["--connect", self._endpoint.address, "--agent-id", agent, "--slots", "0"]
        arguments += ["--parent-pid", str(os.getpid())]
        with secret_pipe(self._endpoint.secret) as token_fd:
            process = self._run(arguments, token_fd)
        pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._process_exited, agent)
        self._running[agent] = _Process(process, pidfd, asyncio.Event())
        self._on_change(AgentChange(agent, AgentPhase.PENDING))

    def _run(self, arguments: list[str], token_fd: int) -> subprocess.Popen[bytes] | ForkedAgent:
        if self._forked is not None:
            forked, self._forked = self._forked, None
            forked.start(arguments, token_fd)
            return forked
        # In a worker the agent stays in its session, by which the zygote of that worker knows whose it is.
        is_nested = RUN_VARIABLE in os.environ
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.agent", *arguments, "--token-fd", str(token_fd)],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != SECRET_VARIABLE},
            pass_fds=[token_fd],
            start_new_session=not is_nested,
            process_group=0 if is_nested else None,
        )

    def pid(self, agent: str) -> int | None:
        """The process of a running agent."""
        found = self._running.get(agent)
        return found.process.pid if found else None

    def kill(self, agent: str) -> None:
        found = self._running.get(agent)
        if found is not None:
            found.process.kill()

    async def close(self, flush_s: float) -> None:
        running = list(self._running.values())
        try:
            async with asyncio.timeout(flush_s + _GRACE_S):
                for one in running:
                    await one.ended.wait()
        except TimeoutError:
            for one in self._running.values():
                one.process.kill()
            for one in running:
                await one.ended.wait()

    def _process_exited(self, name: str) -> None:
        gone = self._running.pop(name)
        self._abandoned.discard(name)
        asyncio.get_running_loop().remove_reader(gone.pidfd)
        os.close(gone.pidfd)
        code = gone.process.wait()
        gone.ended.set()
        self._on_change(AgentChange(name, AgentPhase.GONE, exit_phrase(code)))

"""The embedded engine: agents as child processes on this machine.

One agent is the rule; several stand in for nodes. An agent dies with the controller's process (by its parent death
signal, and because its connection closes), and its death is noticed at once, through a pidfd.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from holdfast.engines.engine import ControllerEndpoint, OnGone

__all__ = ["LocalEngine"]

_GRACE_S = 3.0
"""How long an agent may take to end, besides the time for storing logs and artifacts."""


class _Process(NamedTuple):
    process: subprocess.Popen[bytes]
    pidfd: int
    slots: int


class LocalEngine:
    """Starts `python -m holdfast.agent` processes, `slots_per_agent` workers each."""

    def __init__(self, endpoint: ControllerEndpoint, slots_per_agent: int, on_gone: OnGone) -> None:
        self._endpoint = endpoint
        self._slots_per_agent = slots_per_agent
        self._on_gone = on_gone
        self._numbers = itertools.count()
        self._running: dict[str, _Process] = {}
        self._emptied = asyncio.Event()

    def start(self, slots: int) -> list[str]:
        names: list[str] = []
        while slots > 0:
            share = min(slots, self._slots_per_agent)
            names.append(self._spawn(f"local-{os.getpid()}-{next(self._numbers)}", share))
            slots -= share
        return names

    def pid(self, agent: str) -> int | None:
        """The process of a running agent."""
        found = self._running.get(agent)
        return found.process.pid if found else None

    def kill(self, agent: str) -> None:
        found = self._running.get(agent)
        if found is not None:
            found.process.kill()

    async def close(self, flush_s: float) -> None:
        """The controller has told the agents to shut down; those that take too long are killed."""
        if self._running:
            self._emptied.clear()
            try:
                async with asyncio.timeout(flush_s + _GRACE_S):
                    await self._emptied.wait()
            except TimeoutError:
                for one in self._running.values():
                    one.process.kill()
                await self._emptied.wait()

    def _spawn(self, name: str, slots: int) -> str:
        arguments = ["--connect", self._endpoint.address, "--agent-id", name, "--slots", str(slots)]
        arguments += ["--parent-pid", str(os.getpid())]
        with _readable(self._endpoint.token) as token_fd:
            process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.agent", *arguments, "--token-fd", str(token_fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=[token_fd],
                start_new_session=True,
            )
        pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._process_exited, name)
        self._running[name] = _Process(process, pidfd, slots)
        return name

    def _process_exited(self, name: str) -> None:
        gone = self._running.pop(name)
        asyncio.get_running_loop().remove_reader(gone.pidfd)
        os.close(gone.pidfd)
        code = gone.process.wait()
        if not self._running:
            self._emptied.set()
        self._on_gone(name, gone.slots, _exit_phrase(code))


@contextmanager
def _readable(secret: str) -> Iterator[int]:
    """A pipe from which a child can read a secret, which neither its command line nor its environment shows."""
    reader, writer = os.pipe()
    try:
        os.write(writer, secret.encode())
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def _exit_phrase(code: int) -> str:
    if code < 0:
        return f"its agent was killed by {signal.Signals(-code).name}"
    return f"its agent exited with code {code}"

"""The hub: what all runs of a process share. One server, one engine, the agents' connections, their pings.

A run is a guest: its `Controller` has a core, a lease and a journal of its own, and gets its `RunAgents` from here.
Guests come and go; no guest's trouble is another's. `hub_thread` runs the hub of a process in a thread; the simulator
runs it on its own loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Protocol

from holdfast.control.agent_link import Preparation
from holdfast.control.agent_pool import AgentPool
from holdfast.control.collectives import Answer
from holdfast.control.liveness import LoopWatch
from holdfast.control.publisher import Publisher
from holdfast.control.run_agents import RunAgents
from holdfast.core import events as e
from holdfast.engines.engine import ControllerEndpoint, Engine, OnGone
from holdfast.engines.local import LocalEngine
from holdfast.runtime import current
from holdfast.wire.channel import OnAgent, serve

__all__ = ["Hub", "Listen", "Listener", "MakeEngine", "listen_on_loopback"]

_log = logging.getLogger(__name__)

MakeEngine = Callable[[ControllerEndpoint, OnGone], Engine]


class Listener(Protocol):
    """Accepts agents' connections until it is closed."""

    @property
    def port(self) -> int: ...

    async def close(self) -> None: ...


Listen = Callable[[str, str, OnAgent], Awaitable[Listener]]
"""From the token that agents must prove, the hub's id, and what is awaited for each agent, to a listener."""


async def listen_on_loopback(token: str, hub: str, on_agent: OnAgent) -> Listener:
    return await serve("127.0.0.1", 0, token, on_agent, run=hub)


class Hub:
    """Used from one event loop, between `open` and `close`."""

    def __init__(
        self,
        *,
        listen: Listen = listen_on_loopback,
        make_engine: MakeEngine = LocalEngine,
        agent_silence_s: float | None = None,
    ) -> None:
        """An agent that leaves pings unanswered for `agent_silence_s` is lost (HOLDFAST_AGENT_SILENCE_S, 30 s); this
        process's own standstill does not count."""
        if agent_silence_s is None:
            agent_silence_s = float(os.environ.get("HOLDFAST_AGENT_SILENCE_S", "30"))
        self._listen = listen
        self._make_engine = make_engine
        self._agent_silence_s = agent_silence_s
        self._agents = AgentPool()
        self._engine: Engine | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen for agents. Engines are made when the first run needs them."""
        token = secrets.token_urlsafe(32)
        self._server = await self._listen(token, current().token_hex(4), self._agents.serve)
        self._endpoint = ControllerEndpoint(f"127.0.0.1:{self._server.port}", token)
        loop = asyncio.get_running_loop()
        self._watch = LoopWatch(self._agent_silence_s, loop.time())
        watching = self._agents.watch(self._agent_silence_s, self._watch.interval_s, self._look_for_stall)
        self._watching = loop.create_task(watching)

    def enter(
        self,
        run: str,
        preparation: Preparation,
        workers_per_agent: int,
        post: Callable[[e.Event], None],
        publisher: Publisher,
        answer: Answer,
        make_engine: MakeEngine | None = None,
    ) -> RunAgents:
        """A run becomes a guest: what it gets is its agents, and it leaves by closing them. `make_engine` is for runs
        whose workers only an engine of their own can start (local mode)."""
        if make_engine is not None:
            engine = make_engine(self._endpoint, self._agents.process_gone)
        else:
            engine = self._engine = self._engine or self._make_engine(self._endpoint, self._agents.process_gone)
        return RunAgents(self._agents, engine, run, preparation, workers_per_agent, post, publisher, answer)

    async def close(self) -> None:
        """The last guest has left."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._server.close()

    def _look_for_stall(self) -> None:
        """After a gap of this process's own, the pings are counted anew."""
        if self._watch.stalled_s(asyncio.get_running_loop().time()):
            self._agents.forgive()

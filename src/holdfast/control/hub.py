"""The hub: what all runs of a process share. One server, one engine, the agents' connections, their pings.

A run is a guest: its `Controller` has a core, a lease and a journal of its own, and gets its `RunAgents` from here.
Guests come and go; no guest's trouble is another's. `hub_thread` runs the hub of a process in a thread; the simulator
runs it on its own loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Protocol

from holdfast.control.agent_link import Preparation
from holdfast.control.agent_pool import AgentPool
from holdfast.control.collectives import Answer
from holdfast.control.liveness import LoopWatch
from holdfast.control.publisher import Publisher
from holdfast.control.run_agents import RunAgents
from holdfast.core import events as e
from holdfast.core.admission import Gang
from holdfast.engines.engine import ControllerEndpoint, MakeEngine
from holdfast.engines.local import LocalEngine
from holdfast.storage.run_secret import make_secret
from holdfast.wire.channel import Channel, OnAgent, serve
from holdfast.wire.messages import AgentMessage

__all__ = ["Hub", "Listen", "Listener", "listen_on_loopback"]

_FLUSH_S = 10.0
"""How long agents may take to end. What belongs to runs is stored already."""


class Listener(Protocol):
    """Accepts agents' connections until it is closed."""

    @property
    def port(self) -> int: ...

    async def close(self) -> None: ...


Listen = Callable[[str, OnAgent], Awaitable[Listener]]
"""From the run secret that agents must prove to know, and what is awaited for each agent, to a listener."""


async def listen_on_loopback(secret: str, on_agent: OnAgent) -> Listener:
    return await serve("127.0.0.1", 0, secret, on_agent)


class Hub:
    """Used from one event loop, between `open` and `close`."""

    def __init__(
        self,
        *,
        secret: str | None = None,
        listen: Listen = listen_on_loopback,
        make_engine: MakeEngine = LocalEngine,
        agent_silence_s: float | None = None,
    ) -> None:
        """`secret` is the run secret of all agents; None: nobody else needs to know it. An agent that leaves pings
        unanswered for `agent_silence_s` is lost (HOLDFAST_AGENT_SILENCE_S, 30 s); this process's own standstill does
        not count."""
        if agent_silence_s is None:
            agent_silence_s = float(os.environ.get("HOLDFAST_AGENT_SILENCE_S", "30"))
        self._secret = make_secret() if secret is None else secret
        self._listen = listen
        self._make_engine = make_engine
        self._agent_silence_s = agent_silence_s
        self._pools: list[AgentPool] = []
        self._shared: AgentPool | None = None
        self._pinging: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen for agents. Engines are made when the first run needs them."""
        self._server = await self._listen(self._secret, self._serve)
        self._endpoint = ControllerEndpoint(f"127.0.0.1:{self._server.port}", self._secret)
        self._pinging = asyncio.get_running_loop().create_task(self._ping())

    def enter(
        self,
        gang: Gang,
        preparation: Preparation,
        post: Callable[[e.Event], None],
        publisher: Publisher,
        answer: Answer,
        make_engine: MakeEngine | None = None,
    ) -> RunAgents:
        """A run becomes a guest: what it gets is its agents, and it leaves by closing them. `make_engine` is for runs
        whose workers only an engine of their own can start (local mode)."""
        if make_engine is not None:
            pool = self._add_pool(make_engine, private=True)
        else:
            pool = self._shared = self._shared or self._add_pool(self._make_engine)
        return RunAgents(pool, gang, preparation, post, publisher, answer)

    async def close(self) -> None:
        """The last guest has left: end the agents."""
        if self._shared is not None:
            await self._shared.close(_FLUSH_S)
        if self._pinging is not None:
            self._pinging.cancel()
            await asyncio.gather(self._pinging, return_exceptions=True)
        await self._server.close()

    def _add_pool(self, make_engine: MakeEngine, *, private: bool = False) -> AgentPool:
        pool = AgentPool(make_engine, self._endpoint, private=private)
        self._pools = [*(one for one in self._pools if not one.is_closed), pool]
        return pool

    async def _serve(self, channel: Channel[AgentMessage]) -> None:
        """An agent has connected."""
        for pool in self._pools:
            if pool.knows(channel.agent):
                await pool.serve(channel)
                return

    async def _ping(self) -> None:
        """Find agents that no longer answer. After a gap of this process's own, the pings are counted anew."""
        loop = asyncio.get_running_loop()
        watch = LoopWatch(self._agent_silence_s, loop.time())
        limit = max(2, round(self._agent_silence_s / watch.interval_s))
        while True:
            await asyncio.sleep(watch.interval_s)
            stood_still = watch.stalled_s(loop.time()) > 0
            for pool in self._pools:
                if stood_still:
                    pool.forgive()
                pool.ping(limit, self._agent_silence_s)
                pool.tell_waiting()

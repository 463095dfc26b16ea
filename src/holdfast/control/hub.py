"""The hub: what all runs of a process share. One server, one engine, the agents' connections, their pings.

A run is a guest: its `Controller` has a core, a lease and a journal of its own, and gets its `RunAgents` from here.
Guests come and go; no guest's trouble is another's. `hub_thread` runs the hub of a process in a thread; the simulator
runs it on its own loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from holdfast.control.agent_link import Preparation
from holdfast.control.agent_pool import AgentPool
from holdfast.control.api import ControlApi
from holdfast.control.collectives import Answer
from holdfast.control.publisher import Publisher
from holdfast.control.run_agents import RunAgents
from holdfast.control.storage_servers import StorageServers
from holdfast.core import events as e
from holdfast.core.admission import Gang
from holdfast.engines.engine import ControllerEndpoint, EngineName, MakeEngine
from holdfast.engines.join import JoinEngine
from holdfast.engines.local import LocalEngine
from holdfast.engines.ray.options import RayOptions
from holdfast.errors import ConfigError
from holdfast.linux.network import outward_address
from holdfast.storage.run_secret import make_secret
from holdfast.wire.channel import Channel, CheckHello, OnAgent, OnClient, serve
from holdfast.wire.control_messages import Refused
from holdfast.wire.hello import Hello
from holdfast.wire.join_string import is_loopback_name, make_join_string, parse_address, parse_join_string
from holdfast.wire.liveness import LoopWatch
from holdfast.wire.messages import AgentMessage, StorageServed

__all__ = ["Hub", "Listen", "Listener", "listen_with_sockets"]

_ANY_ADDRESS = ("0.0.0.0", "::")
_FLUSH_S = 10.0
"""How long agents may take to end. What belongs to runs is stored already."""


class Listener(Protocol):
    """Accepts the connections of agents and control clients until it is closed."""

    on_client: OnClient | None

    @property
    def port(self) -> int: ...

    async def close(self) -> None: ...


Listen = Callable[[str, int, str, OnAgent, CheckHello], Awaitable[Listener]]
"""From host, port, the run secret that agents must prove to know, what is awaited for each agent, and who is refused,
to a listener."""


async def listen_with_sockets(
    host: str, port: int, secret: str, on_agent: OnAgent, check_hello: CheckHello
) -> Listener:
    return await serve(host, port, secret, on_agent, check_hello=check_hello)


class Hub:
    """Used from one event loop, between `open` and `close`."""

    def __init__(
        self,
        *,
        secret: str | None = None,
        listen: Listen = listen_with_sockets,
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
        self._make_engines: dict[EngineName, MakeEngine] = {
            EngineName.LOCAL: make_engine,
            EngineName.JOIN: JoinEngine,
        }
        self._agent_silence_s = agent_silence_s
        self.api = ControlApi(self._find_storage)
        self._pools: list[AgentPool] = []
        self._shared: dict[EngineName | RayOptions, AgentPool] = {}
        self._listeners: dict[str, Listener] = {}
        """Besides the one on loopback, by the address that was asked for."""
        self._serves_other_machines = False
        self._storage_servers = StorageServers(self._listening_hosts)
        self._storages: set[str] = set()
        """Directories of runs, which may be served."""
        self._opening = asyncio.Lock()
        self._pinging: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen on loopback, for agents of this machine. Engines are made when the first run needs them."""
        self._server = await self._listen("127.0.0.1", 0, self._secret, self._serve, self._find_problem)
        self._server.on_client = self.api.serve
        self._endpoint = ControllerEndpoint(f"127.0.0.1:{self._server.port}", self._secret)
        self._pinging = asyncio.get_running_loop().create_task(self._ping())

    def expect_agents(self) -> None:
        """A run will come that takes agents that join: those that come before it are not refused."""
        if EngineName.JOIN not in self._shared:
            self._shared[EngineName.JOIN] = self._add_shared_pool(EngineName.JOIN)

    def expect_uploads(self, root: str) -> None:
        """A run will come whose files lie in this directory: agents that have something to finish there may."""
        self._storages.add(root)

    async def listen_at(self, address: str) -> None:
        """Accept agents and control clients at this address, too, `HOST:PORT`, as long as the hub lives. Port 0 is any
        that is free; runs that ask for the same address share the listener."""
        host, port = parse_address(address, "ScalingConfig(listen)")
        async with self._opening:
            if address in self._listeners:
                return
            try:
                listener = await self._listen(host, port, self._secret, self._serve, self._find_problem)
            except OSError as error:
                raise ConfigError(
                    f"ScalingConfig(listen={address!r}) cannot be listened at: {error.strerror or error}; choose an "
                    "address of this machine, and a port that is free."
                ) from error
            listener.on_client = self.api.serve
            self._listeners = {**self._listeners, address: listener}  # other threads may be reading it
            self._serves_other_machines |= not is_loopback_name(host)

    @property
    def join_strings(self) -> list[str]:
        """What agents are given to find this hub, the ones for other machines first."""
        found = []
        for address, listener in self._listeners.items():
            host = parse_address(address, "ScalingConfig(listen)")[0]
            found.append(make_join_string(outward_address() if host in _ANY_ADDRESS else host, listener.port))
        return [*found, make_join_string("127.0.0.1", self._server.port)]

    def _listening_hosts(self) -> list[str]:
        """The addresses at which agents reach this machine."""
        hosts = [parse_address(address, "ScalingConfig(listen)")[0] for address in self._listeners]
        everywhere = [host for host in hosts if host in _ANY_ADDRESS]
        return everywhere or list(dict.fromkeys(["127.0.0.1", *hosts]))

    def enter(
        self,
        gang: Gang,
        preparation: Preparation,
        post: Callable[[e.Event], None],
        publisher: Publisher,
        answer: Answer,
        make_engine: MakeEngine | None = None,
        engine: EngineName | RayOptions = EngineName.LOCAL,
    ) -> RunAgents:
        """A run becomes a guest: what it gets is its agents, and it leaves by closing them. `make_engine` is for runs
        whose workers only an engine of their own can start (local mode)."""
        if make_engine is not None:
            pool = self._add_pool(make_engine, self._endpoint, private=True)
        elif engine in self._shared:
            pool = self._shared[engine]
        else:
            pool = self._shared[engine] = self._add_shared_pool(engine)
        return RunAgents(pool, gang, preparation, post, publisher, answer, self._storage_servers)

    async def close(self) -> None:
        """The last guest has left: end the agents."""
        for pool in self._shared.values():
            await pool.close(_FLUSH_S)
        await self._storage_servers.close()
        if self._pinging is not None:
            self._pinging.cancel()
            await asyncio.gather(self._pinging, return_exceptions=True)
        await self.api.close()
        for listener in [*self._listeners.values(), self._server]:
            await listener.close()

    def _add_shared_pool(self, engine: EngineName | RayOptions) -> AgentPool:
        if isinstance(engine, EngineName):
            return self._add_pool(self._make_engines[engine], self._endpoint)
        from holdfast.engines.ray.engine import RayEngine

        reachable = ControllerEndpoint(parse_join_string(self.join_strings[0]), self._secret)
        return self._add_pool(partial(RayEngine, engine), reachable)

    def _add_pool(self, make_engine: MakeEngine, endpoint: ControllerEndpoint, *, private: bool = False) -> AgentPool:
        pool = AgentPool(make_engine, endpoint, self._agent_silence_s, private=private)
        self._pools = [*(one for one in self._pools if not one.is_closed), pool]
        return pool

    async def _find_storage(self, root: str) -> StorageServed | Refused:
        served = await self._storage_servers.serve(root) if root in self._storages else None
        if served is None or served.error:
            return Refused(reason=served.error if served is not None else f"No run of this driver lies in {root}.")
        return served

    async def _serve(self, channel: Channel[AgentMessage]) -> None:
        """An agent has connected."""
        if (pool := self._pool_of(channel.agent)) is not None:
            await pool.serve(channel)

    def _pool_of(self, agent: str) -> AgentPool | None:
        """Agents that no other engine has started have joined by themselves."""
        joining = self._shared.get(EngineName.JOIN)
        for pool in self._pools:
            if pool is not joining and pool.knows(agent):
                return pool
        return joining

    def _find_problem(self, hello: Hello, peer: str) -> str | None:
        """Why an agent that knows the secret cannot be used."""
        pool = self._pool_of(hello.agent)
        if pool is None:
            return (
                f"No run of this driver takes agents that join, so agent {hello.agent} is not needed: set "
                f'ScalingConfig(engine="{EngineName.JOIN}").'
            )
        is_joining = pool is self._shared.get(EngineName.JOIN)
        if is_joining and self._serves_other_machines and is_loopback_name(hello.address or peer):
            return (
                f"Agent {hello.agent} would announce {hello.address or peer}, which no other machine can reach: give "
                "it --advertise with an address of its machine, or --join with one of the controller's."
            )
        return None

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

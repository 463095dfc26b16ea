"""The engine of a Ray cluster: placement groups hold what workers take, and an agent on each of their nodes has it.

What is wanted, reserved and running is compared again and again, in one task: groups are created for gangs that have
none, and an agent is started for the bundles of a node that have none. Nothing is decided by the order in which Ray
tells something. An agent's connection notices its death first; Ray places the bundles of a node that died elsewhere by
itself, and those of an agent whose process ended get another one on the same node.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase
from holdfast.engines.engine import AgentChange, ControllerEndpoint, OnChange
from holdfast.engines.ray import cluster
from holdfast.engines.ray.bundles import GroupKind, Shape, group_kinds, missing_groups
from holdfast.engines.ray.options import RayOptions

__all__ = ["RayEngine"]

_GRACE_S = 3.0
"""How long an agent may take to end, besides the time for storing logs and artifacts."""
_POLL_S = 1.0
"""How often the cluster is asked where bundles are and which nodes are drained."""
_FAST_POLL_S = 0.01
"""The same at first while bundles are being placed."""
_GATHER_S = 0.2
"""How long bundles that are placed wait for others, so that a node gets one agent for all of them."""
_REPLACE_S = 1.0
"""How long the process of a lost agent may take to end before its bundles are reserved elsewhere, too."""
_DIAL_S = 30
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Bundle:
    group: _Group
    index: int
    node: str = ""
    """Where it is; "" while it is nowhere."""
    placed_at: float = 0.0
    agent: _Agent | None = None
    retired: bool = False
    """Whether it is replaced by one elsewhere, and gets no agent any more."""


@dataclass(slots=True, eq=False)
class _Group:
    handle: cluster.PlacementGroup
    shape: Shape
    bundles: list[_Bundle] = field(default_factory=list)

    @property
    def kind(self) -> GroupKind:
        """What of it can be used."""
        return GroupKind(self.shape, sum(not one.retired for one in self.bundles))


@dataclass(slots=True, eq=False)
class _Agent:
    name: str
    node: str
    bundles: list[_Bundle]
    process: cluster.AgentProcess
    abandoned_at: float | None = None
    draining: bool = False


class RayEngine:
    """Made by the hub when the first run asks for it, in a process that is connected to a cluster."""

    def __init__(self, options: RayOptions, endpoint: ControllerEndpoint, on_change: OnChange) -> None:
        self._options = options
        self._endpoint = endpoint
        self._on_change = on_change
        self._wanted: Counter[GroupKind] = Counter()
        self._groups: list[_Group] = []
        self._agents: dict[str, _Agent] = {}
        self._may_start = False
        """Whether agents were asked for since the last one ended: one that fails at once is not started in a loop."""
        self._names = (f"ray-{secrets.token_hex(3)}-{n}" for n in itertools.count())
        self._changed = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, "holdfast-ray")
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ what the hub asks

    def want(self, gangs: Sequence[Gang]) -> None:
        """All gangs at once: Ray may have room for them, or make it."""
        self._wanted = group_kinds(gangs)
        self._may_start = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._reconcile())
        self._changed.set()

    def knows(self, agent: str) -> bool:
        return agent in self._agents

    def abandon(self, agent: str) -> None:
        found = self._agents.get(agent)
        if found is not None and found.abandoned_at is None:
            found.abandoned_at = asyncio.get_running_loop().time()
            self._changed.set()

    def kill(self, agent: str) -> None:
        if (found := self._agents.get(agent)) is not None:
            self._executor.submit(cluster.kill_actor, found.process.actor)

    async def close(self, flush_s: float) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(flush_s + _GRACE_S):
                await self._wait_until_ended()
        except TimeoutError:
            for agent in list(self._agents):
                self.kill(agent)
            await self._wait_until_ended()
        for group in self._groups:
            await self._call(cluster.remove_group, group.handle)
        self._executor.shutdown()

    async def _wait_until_ended(self) -> None:
        while self._agents:
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------ comparing

    async def _call(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call Ray, which blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def _reconcile(self) -> None:
        pause_s = _FAST_POLL_S
        while True:
            self._changed.clear()
            try:
                settled = await self._step()
            except Exception as error:  # noqa: BLE001  whatever Ray raises is told to those who wait
                _log.warning("Ray: %s", error)
                self._refuse(f"Ray refused: {error}")
                settled = True
            pause_s = _POLL_S if settled else min(pause_s * 2, _POLL_S)
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
                pause_s = _FAST_POLL_S
            except TimeoutError:
                pass

    async def _step(self) -> bool:
        """Bring what there is closer to what is wanted; whether nothing is on its way."""
        now = asyncio.get_running_loop().time()
        self._retire(now, await self._call(cluster.draining_nodes))
        await self._drop_groups()
        for kind in missing_groups(self._wanted, [group.kind for group in self._groups]):
            handle = await self._call(cluster.create_group, kind, self._options)
            group = _Group(handle, kind.shape)
            group.bundles = [_Bundle(group, index) for index in range(kind.workers)]
            self._groups.append(group)
        pending = False
        for group in list(self._groups):
            is_placed, found = await self._call(cluster.group_nodes, group.handle)
            pending = pending or not is_placed
            for bundle in group.bundles:
                node = found.get(bundle.index, "")
                if node != bundle.node:
                    bundle.node, bundle.placed_at = node, now
                if bundle.agent is not None and bundle.agent.node != node:
                    self._evict(bundle.agent, now)
        if self._may_start:
            free = [
                bundle
                for group in self._groups
                for bundle in group.bundles
                if bundle.node and bundle.agent is None and not bundle.retired
            ]
            if free and (not pending or now - min(one.placed_at for one in free) > _GATHER_S):
                for node in dict.fromkeys(one.node for one in free):
                    await self._start(node, [one for one in free if one.node == node])
        return not pending

    def _retire(self, now: float, draining: dict[str, float | None]) -> None:
        """Give up bundles on nodes that are drained, and of lost agents whose process does not end."""
        for agent in list(self._agents.values()):
            is_draining = agent.node in draining
            if is_draining and not agent.draining:
                agent.draining = True
                why = "Ray drains its node"
                self._on_change(AgentChange(agent.name, AgentPhase.DRAINING, why, draining[agent.node]))
            is_late = agent.abandoned_at is not None and now - agent.abandoned_at >= _REPLACE_S
            if is_draining or is_late:
                for bundle in agent.bundles:
                    bundle.retired = True

    async def _drop_groups(self) -> None:
        """Give back groups of which nothing is used any more, and those that wait for a node and are not needed."""
        for group in list(self._groups):
            others = [one.kind for one in self._groups if one is not group]
            is_waiting = not any(one.node for one in group.bundles)
            is_useless = not group.kind.workers or (is_waiting and not missing_groups(self._wanted, others))
            if is_useless and all(one.agent is None for one in group.bundles):
                self._groups.remove(group)
                await self._call(cluster.remove_group, group.handle)

    # ------------------------------------------------------------ agents

    async def _start(self, node: str, bundles: list[_Bundle]) -> None:
        name = next(self._names)
        total: Counter[str] = Counter()
        for bundle in bundles:
            total.update(dict(bundle.group.shape))
        resources = {"CPU": 0.0, "memory": 0.0} | {key: amount for key, amount in total.items() if key != "GPU"}
        arguments = ["--connect", self._endpoint.address, "--agent-id", name, "--slots", str(len(bundles))]
        arguments += ["--resources", msgspec.json.encode(resources).decode(), "--comes-back", "--dial", str(_DIAL_S)]
        placed = [(one.group.handle, one.index, one.group.shape) for one in bundles]
        process = await self._call(
            cluster.start_agent, placed, arguments, self._endpoint.secret, self._options.runtime_env
        )
        agent = self._agents[name] = _Agent(name, node, bundles, process)
        for bundle in bundles:
            bundle.agent = agent
        self._on_change(AgentChange(name, AgentPhase.PENDING))
        loop = asyncio.get_running_loop()
        asyncio.wrap_future(process.ended, loop=loop).add_done_callback(lambda ended: self._ended(agent, ended))

    def _evict(self, agent: _Agent, now: float) -> None:
        """Ray has taken bundles of the agent to another node, or looks for one: its node has died. Those that are left
        may be on different nodes by now."""
        if agent.abandoned_at is None:
            agent.abandoned_at = now
        for bundle in agent.bundles:
            bundle.agent, bundle.retired = None, False
        agent.bundles = []
        self._executor.submit(cluster.kill_actor, agent.process.actor)

    def _ended(self, agent: _Agent, ended: asyncio.Future[str]) -> None:
        """The agent's process has ended, or Ray has lost its actor or its node."""
        del self._agents[agent.name]
        for bundle in agent.bundles:
            bundle.agent = None
            bundle.retired = bundle.retired and agent.draining  # who was only late can be used again
        if agent.abandoned_at is None:  # or it was lost already, and others may have been asked for since
            self._may_start = False
        error = ended.exception()
        if error is not None:
            self._executor.submit(cluster.kill_actor, agent.process.actor)
        why = ended.result() if error is None else cluster.reason_of(error)
        self._changed.set()
        self._on_change(AgentChange(agent.name, AgentPhase.GONE, why))

    def _refuse(self, why: str) -> None:
        """Tell those who wait that nothing comes, as of an agent that failed to start."""
        self._may_start = False
        self._on_change(AgentChange(next(self._names), AgentPhase.GONE, why))

"""The engine of a Ray cluster: placement groups hold what workers take, and an agent on each of their nodes has it.

What is wanted, reserved and running is compared again and again, in one task: groups are created for gangs that have
none, and an agent is started for the bundles of a node that have none. Nothing is decided by the order in which Ray
tells something. An agent's connection notices its death first. The bundles of an agent whose process ended get another
one on the same node, if its raylet answers. If it does not, they are reserved anew on other nodes at once: Ray places
the bundles of a dead node elsewhere by itself, but takes some 15 s to notice the death.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase
from holdfast.engines.engine import AgentChange, ControllerEndpoint, OnChange
from holdfast.engines.ray import cluster
from holdfast.engines.ray.bundles import GroupKind, Shape, group_kinds, missing_groups, spare_kinds
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
_ANSWER_S = 1.0
"""How long a raylet may take to accept a connection."""
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
    """Whether it is to be replaced by one elsewhere, and gets no agent, unless it is taken back."""


@dataclass(slots=True, eq=False)
class _Group:
    handle: cluster.PlacementGroup
    shape: Shape
    bundles: list[_Bundle] = field(default_factory=list)
    is_spare: bool = False
    """Whether it was made for a spare agent."""

    @property
    def kind(self) -> GroupKind:
        """What of it can be used."""
        return GroupKind(self.shape, sum(not one.retired for one in self.bundles))

    @property
    def is_waiting(self) -> bool:
        """Whether nothing of it is anywhere."""
        return not any(one.node for one in self.bundles)


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
        self._gangs: Sequence[Gang] = ()
        self._wanted: Counter[GroupKind] = Counter()
        """What the workers of these take."""
        self._groups: list[_Group] = []
        self._reserved: list[cluster.PlacementGroup] = []
        """All that Ray was asked for and has not got back; used in the executor's thread."""
        self._agents: dict[str, _Agent] = {}
        self._doubted: set[str] = set()
        """Nodes that have lost an agent since they were last looked at."""
        self._unreachable: frozenset[str] = frozenset()
        """Nodes that do not answer, and that Ray takes to be alive."""
        self._look_again_at = 0.0
        """When these are looked at again: that takes as long as they may take to answer."""
        self._draining: frozenset[str] = frozenset()
        self._may_start = False
        """Whether agents were asked for since the last one ended: one that fails at once is not started in a loop."""
        self._names = (f"ray-{secrets.token_hex(3)}-{n}" for n in itertools.count())
        self._changed = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, "holdfast-ray")
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ what the hub asks

    def want(self, gangs: Sequence[Gang]) -> None:
        """All gangs at once: Ray may have room for them, or make it."""
        self._gangs, self._wanted = gangs, group_kinds(gangs)
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
            self._doubted.add(found.node)
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
        await self._call(self._remove_all)  # after what was being called when the task was cancelled
        self._executor.shutdown()

    async def _wait_until_ended(self) -> None:
        while self._agents:
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------ comparing

    async def _call(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call Ray, which blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _create_group(self, *arguments: Any) -> cluster.PlacementGroup:
        handle = cluster.create_group(*arguments)
        self._reserved.append(handle)
        return handle

    def _remove_group(self, handle: cluster.PlacementGroup) -> None:
        cluster.remove_group(handle)
        self._reserved.remove(handle)

    def _remove_all(self) -> None:
        for handle in list(self._reserved):
            try:
                self._remove_group(handle)
            except Exception as error:  # noqa: BLE001  whatever Ray raises: the rest goes down all the same
                _log.warning("Ray: a placement group could not be removed: %s", error)

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
        await self._look_at_nodes()
        self._retire(now, await self._call(cluster.draining_nodes))
        for group in self._groups:
            if group.is_waiting:
                self._take_back(group.kind, is_spare=group.is_spare)
        with_spares = self._wanted + spare_kinds(self._gangs, self._held_per_node())
        await self._drop_groups(with_spares)
        counted = [group.kind for group in self._groups if not (group.is_spare and group.is_waiting)]
        for kind in missing_groups(self._wanted, counted):
            await self._reserve(kind, self._options, self._excluded_nodes(kind))
        for kind in missing_groups(with_spares, [group.kind for group in self._groups]):
            options = replace(self._options, placement_strategy="STRICT_PACK")
            await self._reserve(kind, options, self._unreachable | self._used_nodes(kind.shape), is_spare=True)
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

    async def _look_at_nodes(self) -> None:
        """Find out which of the nodes that have lost an agent still answer. Others are looked at again and again, until
        Ray, too, knows that they are dead."""
        loop = asyncio.get_running_loop()
        if not self._doubted and not (self._unreachable and loop.time() >= self._look_again_at):
            return
        alive = await self._call(cluster.nodes)
        names, self._doubted = self._doubted | self._unreachable, set()
        nodes = [node for node in alive if node.id in names]
        answers = await asyncio.gather(*map(_answers, nodes))
        self._unreachable = frozenset(node.id for node, answer in zip(nodes, answers, strict=True) if not answer)
        self._look_again_at = loop.time() + _POLL_S
        for agent in [one for one in self._agents.values() if one.node in self._unreachable]:
            if agent.abandoned_at is not None:
                self.kill(agent.name)  # in case it lives after all
                self._forget(agent, "its Ray node does not answer")

    def _retire(self, now: float, draining: dict[str, float | None]) -> None:
        """Give up bundles on nodes that are drained or do not answer, and of lost agents whose process does not end.
        Those of an agent that lives are used again once its node answers."""
        self._draining = frozenset(draining)
        for agent in list(self._agents.values()):
            if agent.node in draining and not agent.draining:
                agent.draining = True
                why = "Ray drains its node"
                self._on_change(AgentChange(agent.name, AgentPhase.DRAINING, why, draining[agent.node]))
            if agent.abandoned_at is not None and now - agent.abandoned_at >= _REPLACE_S:
                for bundle in agent.bundles:
                    bundle.retired = True
        unfit = self._unreachable | self._draining
        for group in self._groups:
            for bundle in group.bundles:
                lives = bundle.agent is not None and bundle.agent.abandoned_at is None
                bundle.retired = bundle.node in unfit or (bundle.retired and not lives)

    async def _reserve(
        self, kind: GroupKind, options: RayOptions, without: frozenset[str], *, is_spare: bool = False
    ) -> None:
        """Have a group of this kind, on other nodes than those."""
        if self._take_back(kind, is_spare=is_spare):
            return
        handle = await self._call(self._create_group, kind, options, without)
        group = _Group(handle, kind.shape, is_spare=is_spare)
        group.bundles = [_Bundle(group, index) for index in range(kind.workers)]
        self._groups.append(group)

    def _take_back(self, kind: GroupKind, *, is_spare: bool) -> bool:
        """Use bundles again that were given up, if a group has enough of them: Ray places those of a dead node
        elsewhere, a node may answer again, and an agent end that was only late."""
        unfit = self._unreachable | self._draining
        if is_spare:
            unfit |= self._used_nodes(kind.shape) | {""}
        for group in self._groups:
            found = [one for one in group.bundles if one.retired and one.agent is None and one.node not in unfit]
            if group.shape == kind.shape and len(found) >= kind.workers:
                for bundle in found[: kind.workers]:
                    bundle.retired = False
                return True
        return False

    def _excluded_nodes(self, kind: GroupKind) -> frozenset[str]:
        """The nodes on which Ray shall not place a new group of workers. What replaces a part of a strictly spread gang
        must be on another node than the rest of it."""
        is_part = kind not in self._wanted and self._options.placement_strategy == "STRICT_SPREAD"
        broken = [one for one in self._groups if one.shape == kind.shape and any(b.retired for b in one.bundles)]
        others = {bundle.node for group in broken if is_part for bundle in group.bundles if bundle.node}
        return self._unreachable | others

    def _used_nodes(self, shape: Shape) -> frozenset[str]:
        """The nodes that have such bundles."""
        bundles = [one for group in self._groups if group.shape == shape for one in group.bundles]
        return frozenset(one.node for one in bundles if one.node and not one.retired)

    def _held_per_node(self) -> dict[Shape, int]:
        """How many bundles of each shape there are at most on a node, for workers or for one spare agent."""
        found: dict[Shape, int] = {}
        counts: Counter[tuple[Shape, str]] = Counter()
        for group in self._groups:
            if group.is_spare:
                found[group.shape] = max(found.get(group.shape, 0), group.kind.workers)
            else:
                counts.update((group.shape, one.node) for one in group.bundles if one.node and not one.retired)
        for (shape, _), count in counts.items():
            found[shape] = max(found.get(shape, 0), count)
        return found

    async def _drop_groups(self, wanted: Counter[GroupKind]) -> None:
        """Give back groups of which nothing is used any more, and those that wait for a node and are not needed."""
        for group in list(self._groups):
            others = [one.kind for one in self._groups if one is not group]
            is_useless = not group.kind.workers or (group.is_waiting and not missing_groups(wanted, others))
            if is_useless and all(one.agent is None for one in group.bundles):
                self._groups.remove(group)
                await self._call(self._remove_group, group.handle)

    # ------------------------------------------------------------ agents

    async def _start(self, node: str, bundles: list[_Bundle]) -> None:
        name = next(self._names)
        total: Counter[str] = Counter()
        for bundle in bundles:
            total.update(dict(bundle.group.shape))
        resources = {"CPU": 0.0, "memory": 0.0} | {key: amount for key, amount in total.items() if key != "GPU"}
        arguments = ["--connect", self._endpoint.address, "--agent-id", name, "--slots", str(len(bundles))]
        arguments += ["--resources", msgspec.json.encode(resources).decode(), "--comes-back", "--dial", str(_DIAL_S)]
        for module in self._options.imports:
            arguments += ["--import", module]
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
            bundle.agent = None
        agent.bundles = []
        self._executor.submit(cluster.kill_actor, agent.process.actor)

    def _ended(self, agent: _Agent, ended: asyncio.Future[str]) -> None:
        """The agent's process has ended, or Ray has lost its actor or its node."""
        error = ended.exception()
        if agent.name not in self._agents:
            return
        self._doubted.add(agent.node)
        if agent.abandoned_at is None:  # or it was lost already, and others may have been asked for since
            self._may_start = False
        if error is not None:
            self._executor.submit(cluster.kill_actor, agent.process.actor)
        self._forget(agent, ended.result() if error is None else cluster.reason_of(error))

    def _forget(self, agent: _Agent, why: str) -> None:
        """Nothing of the agent is left, or nothing that could be reached."""
        del self._agents[agent.name]
        for bundle in agent.bundles:
            bundle.agent = None
        self._changed.set()
        self._on_change(AgentChange(agent.name, AgentPhase.GONE, why))

    def _refuse(self, why: str) -> None:
        """Tell those who wait that nothing comes, as of an agent that failed to start."""
        self._may_start = False
        self._on_change(AgentChange(next(self._names), AgentPhase.GONE, why))


async def _answers(node: cluster.Node) -> bool:
    """Whether the node's raylet accepts connections."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(node.address, node.port)
    except OSError:
        return False
    writer.close()
    return True

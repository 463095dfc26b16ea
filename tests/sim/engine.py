"""The engine of a simulated driver: it starts nodes, and tells when one is gone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.sim.node import Node

from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase
from holdfast.engines.engine import AgentChange, ControllerEndpoint, OnChange

if TYPE_CHECKING:
    from tests.sim.driver import Driver

__all__ = ["SimulatedEngine"]

_GRACE_S = 5.0


class SimulatedEngine:
    """Starts nodes for one driver. They outlive it if they have uploads to finish."""

    def __init__(self, driver: Driver, endpoint: ControllerEndpoint, on_change: OnChange) -> None:
        self._driver, self._sim = driver, driver.sim
        self._endpoint, self._on_change = endpoint, on_change
        self.nodes: dict[str, Node] = {}
        self._changed = asyncio.Event()
        self._coming: set[str] = set()
        """Agents that count: they are there, or are believed to come."""
        self._numbers = itertools.count()

    def want(self, gangs: Sequence[Gang]) -> None:
        scenario = self._sim.scenario
        slots = scenario.agent_slots or 100
        counts = [
            -(-gang.workers // min(gang.workers_per_agent or gang.workers, slots)) + gang.spares for gang in gangs
        ]
        count = max(counts, default=0) if scenario.runs_take_turns or not scenario.others else sum(counts)
        while len(self._coming) < count:
            self._start(f"node-{self._driver.process.pid}-{next(self._numbers)}")

    def knows(self, agent: str) -> bool:
        return agent in self.nodes

    def abandon(self, agent: str) -> None:
        self._coming.discard(agent)

    def kill(self, agent: str) -> None:
        if (node := self.nodes.get(agent)) is not None:
            node.process.kill()

    async def close(self, flush_s: float) -> None:
        try:
            async with asyncio.timeout(flush_s + _GRACE_S):
                await self._wait_empty()
        except TimeoutError:
            for agent in list(self.nodes):
                self.kill(agent)
            await self._wait_empty()

    async def _wait_empty(self) -> None:
        while self.nodes:
            self._changed.clear()
            await self._changed.wait()

    def _start(self, agent: str) -> None:
        if not self._sim.is_quiet and self._sim.happens(self._sim.scenario.refusals):
            self._sim.excuses.add("refusals")
            if self._sim.happens(0.25):
                raise OSError("no room")
            self._coming.add(agent)
            self._driver.process.after(self._sim.delay_s(0.2), self._refuse, agent)
            return
        self._coming.add(agent)
        self._on_change(AgentChange(agent, AgentPhase.PENDING))
        node = self.nodes[agent] = self._sim.start_node(
            agent, self._driver, self._sim.scenario.agent_slots, self._endpoint
        )
        node.process.on_death.append(lambda: self._driver.process.after(self._sim.delay_s(0.01), self._gone, node))

    def _refuse(self, agent: str) -> None:
        self._coming.discard(agent)
        self._on_change(AgentChange(agent, AgentPhase.GONE, "no room"))

    def _gone(self, node: Node) -> None:
        del self.nodes[node.name]
        self._coming.discard(node.name)
        self._changed.set()
        if node.connection is None:
            self._sim.excuses.add("refusals")  # it never joined
        self._on_change(AgentChange(node.name, AgentPhase.GONE, "its agent was killed by SIGKILL"))

"""The engine of a simulated driver: it starts nodes, and tells when one is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

from tests.sim.node import Node

from holdfast.engines.engine import ControllerEndpoint, OnGone

if TYPE_CHECKING:
    from tests.sim.driver import Driver

__all__ = ["SimulatedEngine"]

_GRACE_S = 5.0


class SimulatedEngine:
    """Starts nodes for one driver. They outlive it if they have uploads to finish."""

    def __init__(self, driver: Driver, endpoint: ControllerEndpoint, on_gone: OnGone) -> None:
        self._driver, self._sim = driver, driver.sim
        self._endpoint, self._on_gone = endpoint, on_gone
        self.nodes: dict[str, Node] = {}
        self._changed = asyncio.Event()

    def start(self, agent: str, slots: int) -> None:
        if not self._sim.is_quiet and self._sim.happens(self._sim.scenario.refusals):
            self._sim.excuses.add("refusals")
            if self._sim.happens(0.25):
                raise OSError("no room")
            self._driver.process.after(self._sim.delay_s(0.2), self._on_gone, agent, "no room")
            return
        node = self.nodes[agent] = self._sim.start_node(agent, self._driver, slots, self._endpoint)
        node.process.on_death.append(lambda: self._driver.process.after(self._sim.delay_s(0.01), self._gone, node))

    def kill(self, agent: str) -> None:
        if (node := self.nodes.get(agent)) is not None:
            node.process.kill()

    async def wait_ended(self, agents: Collection[str], flush_s: float) -> None:
        try:
            async with asyncio.timeout(flush_s + _GRACE_S):
                await self._wait_gone(agents)
        except TimeoutError:
            for agent in agents:
                self.kill(agent)
            await self._wait_gone(agents)

    async def _wait_gone(self, agents: Collection[str]) -> None:
        while any(agent in self.nodes for agent in agents):
            self._changed.clear()
            await self._changed.wait()

    def _gone(self, node: Node) -> None:
        del self.nodes[node.name]
        self._changed.set()
        if node.connection is None:
            self._sim.excuses.add("refusals")  # it never joined
        self._on_gone(node.name, "its agent was killed by SIGKILL")

"""The engine of a simulated driver: it starts nodes, and tells when one is gone."""

from __future__ import annotations

import asyncio
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
        self._emptied = asyncio.Event()

    def start(self, slots: int) -> list[str]:
        scenario = self._sim.scenario
        names = []
        if not self._sim.is_quiet and self._sim.happens(scenario.refusals / 4):
            self._sim.excuses.add("refusals")
            raise OSError("no room")
        while slots > 0:
            share = min(slots, scenario.slots_per_node)
            slots -= share
            if not self._sim.is_quiet and self._sim.happens(scenario.refusals):
                self._sim.excuses.add("refusals")
                self._driver.process.after(self._sim.delay_s(0.2), self._on_gone, "", share, "no room")
                continue
            names.append(self._start_node(share))
        return names

    def _start_node(self, slots: int) -> str:
        node = self._sim.start_node(self._driver, slots, self._endpoint)
        self.nodes[node.name] = node
        node.process.on_death.append(lambda: self._driver.process.after(self._sim.delay_s(0.01), self._gone, node))
        return node.name

    def kill(self, agent: str) -> None:
        if (node := self.nodes.get(agent)) is not None:
            node.process.kill()

    async def close(self, flush_s: float) -> None:
        if self.nodes:
            self._emptied.clear()
            try:
                async with asyncio.timeout(flush_s + _GRACE_S):
                    await self._emptied.wait()
            except TimeoutError:
                for node in list(self.nodes.values()):
                    node.process.kill()
                await self._emptied.wait()

    def _gone(self, node: Node) -> None:
        del self.nodes[node.name]
        if not self.nodes:
            self._emptied.set()
        if node.connection is None:
            self._sim.excuses.add("refusals")  # it never joined
        self._on_gone(node.name, node.slots, "its agent was killed by SIGKILL")

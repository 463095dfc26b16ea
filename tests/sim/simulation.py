"""One seed from beginning to end: the engine that starts nodes, the user who starts drivers, and the faults."""

from __future__ import annotations

from tests.sim.checkers import Checkers
from tests.sim.clock import Clock, Violation
from tests.sim.disk import Disk
from tests.sim.driver import Driver
from tests.sim.node import Node, Worker
from tests.sim.scenario import Scenario, draw

__all__ = ["Simulation", "simulate"]

_PATIENCE_S = 400.0
"""Virtual time that a run gets to end after the last fault."""


class Simulation:
    """Everything that one seed brings into being."""

    def __init__(self, seed: int, trace: bool = False, scenario: Scenario | None = None) -> None:
        self.seed = seed
        self.clock = Clock(seed, trace)
        self.scenario = scenario or draw(seed)
        self.disk = Disk()
        self.checkers = Checkers(self)
        self.drivers: list[Driver] = []
        self.outage_until = 0.0
        self.excuses: set[str] = set()
        """What may have made the run fail for good."""
        self.over = ""
        self._armed: list[list[object]] = []
        """[moment, how many more of it, kind of fault]"""
        self._nodes = 0
        self._failed = 0

    def run(self) -> str:
        """How the run ended: finished or failed. Raises `Violation`."""
        for fault in self.scenario.faults:
            if fault.moment:
                self.clock.at(fault.at, self._armed.append, [fault.moment, fault.count, fault.kind])
            else:
                self.clock.at(fault.at, self._strike, fault.kind)
        for at in self.scenario.pins:
            self.clock.at(at, self._pin_or_unpin)
        self._fit()
        in_time = self.clock.run(lambda: bool(self.over), self.scenario.quiet_at + _PATIENCE_S)
        if not in_time:
            raise Violation(f"nothing more happened, or too much, and the run is not over at {self.clock.now:.1f} s")
        return self.over

    # ------------------------------------------------------------ the user

    def _fit(self) -> None:
        if not self.over and not any(driver.alive for driver in self.drivers):
            self.drivers.append(Driver(self))

    def ended(self, driver: Driver) -> None:
        """The user sees `fit()` return, or the process die."""
        if driver is self.drivers[-1]:
            self.checkers.ended(driver)
            if driver.status == "failed":
                self._failed += 1
            if driver.status == "finished" or self._failed > self.scenario.retries_of_failed:
                self.over = driver.status
                return
        # A driver that was fenced, or would have been, has no say: whoever comes next sees how things stand.
        self.clock.after(self.clock.delay_s(0.5), self._fit)

    def _pin_or_unpin(self) -> None:
        """`holdfast ckpt pin` or `unpin`, of any checkpoint that is there."""
        if visible := [one.name for one in self.disk.visible()]:
            self.disk.pinned ^= {self.clock.chance.choice(visible)}

    def storage_fails(self) -> bool:
        """Whether one request to the storage fails now."""
        quiet = self.clock.now >= self.scenario.quiet_at
        return self.clock.now < self.outage_until or (not quiet and self.clock.happens(self.scenario.storage_trouble))

    # ------------------------------------------------------------ the engine

    def engine_start(self, driver: Driver, slots: int) -> None:
        while slots > 0:
            share = min(slots, self.scenario.slots_per_node)
            slots -= share
            if self.clock.now < self.scenario.quiet_at and self.clock.happens(self.scenario.refusals):
                self.excuses.add("refusals")
                self.clock.after(self.clock.delay_s(0.2), self._refuse, driver, share)
                continue
            self._nodes += 1
            node = Node(driver, f"node-{self._nodes}", self.scenario.slots_per_node)
            driver.nodes[node.name] = node

    def _refuse(self, driver: Driver, slots: int) -> None:
        from holdfast.core.events import AgentUnavailable

        driver.post(AgentUnavailable(slots=slots, why="no room"))

    # ------------------------------------------------------------ faults

    def moment(self, name: str) -> None:
        """Something happened that makes a good time for a fault: at once, or a blink later."""
        for armed in [one for one in self._armed if one[0] == name]:
            armed[1] -= 1  # type: ignore[operator]
            if armed[1] == 0:
                self._armed.remove(armed)
                if self.clock.now < self.scenario.quiet_at:
                    blink_s = self.clock.chance.choice([0.0, self.scenario.message_s, self.scenario.storage_s])
                    self.clock.after(blink_s * self.clock.chance.random(), self._strike, armed[2])

    def _strike(self, kind: str) -> None:
        self.clock.say("FAULT", kind)
        getattr(self, f"_{kind}")()

    def _some_driver(self) -> Driver | None:
        alive = [driver for driver in self.drivers if driver.alive]
        return self.clock.chance.choice(alive) if alive else None

    def _some_node(self) -> Node | None:
        alive = [node for driver in self.drivers for node in driver.nodes.values() if node.alive]
        return self.clock.chance.choice(alive) if alive else None

    def _some_worker(self) -> Worker | None:
        nodes = [node for driver in self.drivers for node in driver.nodes.values() if node.alive]
        alive = [worker for node in nodes for worker in node.workers if worker.alive]
        return self.clock.chance.choice(alive) if alive else None

    def _kill_worker(self) -> None:
        if (worker := self._some_worker()) is not None:
            worker.die("was killed by SIGKILL")

    def _hang_worker(self) -> None:
        if (worker := self._some_worker()) is not None:
            worker.hung = True

    def _kill_node(self) -> None:
        if (node := self._some_node()) is not None:
            node.die()

    def _cut_link(self) -> None:
        if (node := self._some_node()) is not None:
            node.cut()

    def _kill_driver(self) -> None:
        if (driver := self._some_driver()) is not None:
            driver.die()

    def _kill_machine(self) -> None:
        for driver in self.drivers:
            for node in list(driver.nodes.values()):
                node.die()
            driver.die()

    def _take_over(self) -> None:
        if not self.over:
            self.drivers.append(Driver(self))

    def _stop(self) -> None:
        self._request_stop(force=False)

    def _force_stop(self) -> None:
        self._request_stop(force=True)

    def _request_stop(self, *, force: bool) -> None:
        from holdfast.core.events import StopRequested

        if (driver := self._some_driver()) is not None and hasattr(driver, "_monitor"):
            driver.post(StopRequested(why="Ctrl+C", force=force))

    def _outage(self) -> None:
        self.outage_until = self.clock.now + self.clock.chance.uniform(0.5, 2.5) * self.scenario.outage_s


def simulate(seed: int, trace: bool = False) -> Simulation:
    """Run one seed; a `Violation` or an invariant's AssertionError says what broke."""
    simulation = Simulation(seed, trace)
    simulation.run()
    return simulation

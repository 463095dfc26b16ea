"""One run of a simulation: its directory, its workload, what is checked of it, and how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.checkers import Checkers
from tests.sim.scenario import Scenario

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

__all__ = ["Run"]


class Run:
    """Drivers come and go; this is what they all work for."""

    def __init__(self, sim: Simulation, number: int, scenario: Scenario) -> None:
        self.number, self.scenario = number, scenario
        self.name = f"run-{number}" if number else "run"
        self.checkers = Checkers(sim, self)
        self.over = ""
        """How it ended; "" until then."""
        self.failed = 0
        """How often it failed for good."""
        self.disturbed = False
        """Whether a fault struck it."""

"""One `DeleteCheckpoint` carried out: look at the lease, the pin and the token, take the manifest away, then the rest.

Each step takes its time and may fail; the driver may be killed in between, and what is left is a leftover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core import commands as c
from holdfast.core import events as e

if TYPE_CHECKING:
    from tests.sim.driver import Driver

__all__ = ["Removing"]


class Removing:
    """Belongs to one driver, and stops with it wherever it is."""

    def __init__(self, driver: Driver, command: c.DeleteCheckpoint) -> None:
        self.driver, self.name, self.token = driver, command.name, command.token
        self.clock, self.disk = driver.clock, driver.sim.disk
        self.clock.after(self._delay_s(), self._take_manifest)

    def _delay_s(self) -> float:
        return self.clock.delay_s(self.driver.sim.scenario.storage_s)

    def _take_manifest(self) -> None:
        driver, name = self.driver, self.name
        if not driver.alive:
            return
        if driver.sim.storage_fails():
            self._keep("the storage does not answer", invisible=False)
            return
        manifest = self.disk.manifests.get(name)
        if max(self.disk.epochs) > driver.epoch:
            driver.post(e.ControllerFenced(why="a newer controller took over"))
        elif name in self.disk.pinned:
            driver.post(e.CheckpointKept(name=name, token=self.token, pinned=True))
        elif manifest is not None and manifest.token == self.token:
            driver.sim.checkers.deleting(name)
            del self.disk.manifests[name]
            driver.sim.moment("unlinked")
            self.clock.after(self._delay_s(), self._take_rest)
        elif manifest is None and self.disk.tokens.get(name) == self.token:
            self.clock.after(self._delay_s(), self._take_rest)
        else:
            driver.post(e.CheckpointRemoved(name=name, token=self.token, by_others=True))

    def _take_rest(self) -> None:
        if not self.driver.alive:
            return
        if self.driver.sim.storage_fails():
            self._keep("the storage does not answer", invisible=True)
            return
        if self.disk.tokens.get(self.name) == self.token:
            self.disk.delete(self.name)
        self.driver.post(e.CheckpointRemoved(name=self.name, token=self.token))

    def _keep(self, error: str, *, invisible: bool) -> None:
        gone = invisible or self.name not in self.disk.manifests
        self.driver.post(e.CheckpointKept(name=self.name, token=self.token, error=error, invisible=gone))

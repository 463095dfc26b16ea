"""One `PersistCheckpoint` carried out: reserve, upload, commit, look at the fences, tell the core.

Every step takes its time and may find that the storage is away, a node is lost, or the driver is no more. A
failure is told only when it is certain that nothing was committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.disk import Manifest

from holdfast.core import commands as c
from holdfast.core import events as e

if TYPE_CHECKING:
    from tests.sim.driver import Driver

__all__ = ["Persisting"]


class Persisting:
    """Belongs to one driver, and stops with it wherever it is."""

    def __init__(self, driver: Driver, command: c.PersistCheckpoint) -> None:
        self.driver, self.command = driver, command
        self.clock, self.scenario, self.disk = driver.clock, driver.sim.scenario, driver.sim.disk
        self.give_up_at = self.clock.now + self.scenario.patience_s
        self.name, self.index = "", 0
        self.token = f"{driver.epoch}-{command.ticket.generation}-{command.ticket.number}"
        self.parts: dict[int, tuple[int, int]] = {}
        self._next(self._reserve)

    def _next(self, phase: Callable[[], None]) -> None:
        self.clock.after(self.clock.delay_s(self.scenario.storage_s), self._try, phase)

    def _try(self, phase: Callable[[], None]) -> None:
        if not self.driver.alive:
            return
        quiet = self.clock.now >= self.scenario.quiet_at
        if self.clock.now < self.driver.sim.outage_until:
            if self.clock.now >= self.give_up_at and phase != self._tell:
                self.driver.sim.excuses.add("outage")
                self._fail("the storage was away for too long", fatal=True)
                return
            self.clock.after(0.5, self._try, phase)
        elif not quiet and phase != self._tell and self.clock.happens(self.scenario.storage_fatal):
            self.driver.sim.excuses.add("storage")
            self._fail("the storage refuses", fatal=True)
        elif not quiet and self.clock.happens(self.scenario.storage_trouble):
            self._next(phase)
        else:
            phase()

    def _reserve(self) -> None:
        command, epoch = self.command, self.driver.epoch
        found = self.disk.reserve(epoch, command.at_least_index, command.name, self.token)
        if found is None:
            if epoch < max(self.disk.epochs):
                self.driver.post(e.ControllerFenced(why=f"{command.name} is another's"))
                return
            if self.driver.state.fatal is None:  # or the other name's checkpoint failed, and the run ends of that
                self.driver.sim.checkers.fail(f"the name {command.name} is taken by ourselves")
            self._fail(f"the name {command.name} is taken", fatal=True)
            return
        self.name, self.index = found
        self.driver.sim.moment("reserved")
        self._next(self._upload)

    def _upload(self) -> None:
        for rank, agent in self.command.parts:
            node = self.driver.nodes.get(agent)
            part = node.staged.get((self.command.ticket, rank)) if node is not None and node.alive else None
            if node is None or part is None:
                if node is not None and node.alive:
                    self.driver.sim.checkers.fail(f"{agent} does not hold the part of rank {rank}")
                self._fail(f"agent {agent} was lost with the part of rank {rank}", fatal=False)
                return
            self.parts[rank] = part
        self.driver.sim.moment("uploaded")
        self._next(self._commit)

    def _commit(self) -> None:
        command = self.command
        manifest = Manifest(
            name=self.name,
            index=self.index,
            epoch=self.driver.epoch,
            iteration=command.iteration,
            generation=command.ticket.generation,
            world_size=command.world_size,
            metrics=command.metrics,
            parts=self.parts,
            token=self.token,
        )
        self.manifest = manifest
        if not self.disk.create(manifest):
            self.driver.post(e.ControllerFenced(why=f"{self.name} was shut"))
            return
        self.clock.say(self.driver.name, "created the manifest of %s", self.name)
        self.driver.sim.checkers.committed(manifest)
        self.driver.sim.moment("created")
        self._next(self._tell)

    def _tell(self) -> None:
        if self.disk.is_fenced(self.driver.epoch, self.index):
            self.driver.post(e.ControllerFenced(why=f"{self.name} came too late"))
        else:
            self.driver.sim.checkers.acknowledged.add(self.name)
            self.driver.post(e.CheckpointStored(ticket=self.command.ticket, stored=self.manifest.stored()))

    def _fail(self, why: str, *, fatal: bool) -> None:
        self.disk.abandon(self.name, self.driver.epoch, self.token)
        self.driver.post(e.CheckpointFailed(ticket=self.command.ticket, error=why, fatal=fatal))

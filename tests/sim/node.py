"""A node: the agent, its workers, and its connection to the driver that it was started for.

The connection is an ordered stream in each direction. It may be slow or be cut; what was under way is then lost from
some point on, and each side notices in its own time. A part that a worker has handed over outlives the worker, not
the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.scenario import gain

from holdfast.core import events as e
from holdfast.core.checkpoint_types import Report
from holdfast.core.commands import Place, StartWorkers
from holdfast.core.records import WorkerFailure

if TYPE_CHECKING:
    from tests.sim.driver import Driver

__all__ = ["Fabric", "Node", "Worker"]

_FOREVER = float("inf")


class Fabric:
    """What the workers of one generation share: they wait for each other after each iteration, if they do."""

    def __init__(self, world_size: int, lockstep: bool) -> None:
        self.world_size = world_size
        self.lockstep = lockstep
        self.workers: list[Worker] = []

    def must_wait(self, worker: Worker) -> bool:
        if not self.lockstep:
            return False
        if len(self.workers) < self.world_size:
            return True
        return any(peer.iteration < worker.iteration and not peer.finished for peer in self.workers)

    def moved(self) -> None:
        if self.lockstep:
            for worker in self.workers:
                if worker.idle:
                    worker.idle = False
                    worker.soon()


class Worker:
    """One rank: trains from what it loaded, reports each iteration, and finishes or dies."""

    def __init__(self, node: Node, generation: int, rank: int, fabric: Fabric) -> None:
        self.node, self.generation, self.rank, self.fabric = node, generation, rank, fabric
        self.iteration = self.sum = self.number = 0
        self.alive, self.hung, self.finished, self.idle = True, False, False, False
        self.blocked = False
        self.unsettled: e.Ticket | None = None
        self.batch: list[Report] = []
        fabric.workers.append(self)

    def load(self, checkpoint: str | None, iteration: int) -> None:
        if not self.alive:
            return
        if checkpoint is not None:
            driver = self.node.driver
            found = driver.sim.checkers.loaded(driver, checkpoint, iteration)
            if found is None:
                self.die(f"raised NotCommitted: {checkpoint}", "NotCommitted")
                return
            self.iteration, self.sum = found
        self.soon()
        self.fabric.moved()

    def soon(self) -> None:
        clock = self.node.clock
        clock.after(clock.delay_s(self.node.scenario.step_s), self.advance)

    def advance(self) -> None:
        if not self.alive or self.hung or self.blocked or self.finished:
            return
        if self.fabric.must_wait(self):
            self.idle = True
            return
        scenario = self.node.scenario
        if self.iteration >= scenario.iterations:
            self.finish()
            return
        iteration = self.iteration + 1
        if self.rank == 0 and scenario.poison.get(iteration, 0) > 0:
            scenario.poison[iteration] -= 1
            self.die(f"raised ValueError: step {iteration}", "ValueError")
            return
        part = iteration % scenario.checkpoint_every == 0 and scenario.gives_part(self.rank, self.fabric.world_size)
        if part and self.unsettled is not None:
            self.blocked = True
            self.node.send(e.WorkerWaited(generation=self.generation, rank=self.rank, waiting=True))
            return
        self.report(iteration, part)

    def report(self, iteration: int, part: bool) -> None:
        self.iteration, self.number = iteration, self.number + 1
        self.sum += gain(iteration)
        if part:
            ticket = e.Ticket(self.generation, self.number)
            self.unsettled = ticket
            self.node.staged[ticket, self.rank] = (self.iteration, self.sum)
            self.node.driver.sim.moment("part")
        metrics = {"sum": self.sum, "noise": gain(iteration) % 7} if self.rank == 0 else None
        name = self.node.scenario.dir_name(iteration) if self.rank == 0 else None
        self.batch.append(
            Report(
                number=self.number,
                at=self.node.clock.now,
                metrics=metrics,
                checkpoint=part,
                checkpoint_dir_name=name,
            )
        )
        if len(self.batch) >= self.node.scenario.batch or part:
            self.hand_over()
        elif len(self.batch) == 1:
            self.node.clock.after(0.05, self.hand_over)
        self.soon()
        self.fabric.moved()

    def hand_over(self) -> None:
        if self.batch:
            items = tuple(self.batch)
            self.batch.clear()
            self.node.send(e.RankReported(generation=self.generation, rank=self.rank, reports=items))

    def settled(self, ticket: e.Ticket) -> None:
        if self.unsettled == ticket:
            self.unsettled = None
            if self.blocked:
                self.blocked = False
                self.node.send(e.WorkerWaited(generation=self.generation, rank=self.rank, waiting=False))
                self.advance()

    def finish(self) -> None:
        self.finished = True
        self.hand_over()
        value = self.sum if self.rank == 0 else None
        self.node.send(e.WorkerFinished(generation=self.generation, rank=self.rank, value=value))
        self.fabric.moved()

    def die(self, cause: str, error_type: str | None = None) -> None:
        """The agent hears of it from the kernel, after everything that the worker had handed over."""
        if not self.alive or self.finished:
            return
        self.alive = False
        self.node.clock.after(self.node.clock.delay_s(0.002), self.node.bury, self, cause, error_type)


class Node:
    """One agent with its workers. It belongs to one driver and goes when that goes."""

    def __init__(self, driver: Driver, name: str, slots: int) -> None:
        self.driver, self.name, self.slots = driver, name, slots
        self.clock, self.scenario = driver.sim.clock, driver.sim.scenario
        self.alive, self.joined = True, False
        self.workers: list[Worker] = []
        self.staged: dict[tuple[e.Ticket, int], tuple[int, int]] = {}
        self.cut_at = _FOREVER
        """What would arrive after this, in either direction, does not."""
        self._up_at = self._down_at = 0.0
        self.clock.after(self.clock.delay_s(0.3), self._join)

    def _join(self) -> None:
        if self.alive and self.driver.alive:
            self.send(e.AgentJoined(agent=self.name, host=f"host-{self.name}", slots=self.slots))
            self.clock.after(self.clock.delay_s(0.2), self.send, e.AgentPrepared(agent=self.name))

    # ------------------------------------------------------------ the stream

    def send(self, event: e.Event) -> None:
        """To the driver."""
        if self.alive:
            self._up_at = max(self._up_at, self.clock.now + self.clock.delay_s(self.scenario.message_s))
            self.clock.at(self._up_at, self._arrive, self._up_at, self.driver.hear, self, event)

    def order(self, action: Callable[..., None], *arguments: object) -> None:
        """From the driver."""
        self._down_at = max(self._down_at, self.clock.now + self.clock.delay_s(self.scenario.message_s))
        self.clock.at(self._down_at, self._arrive, self._down_at, self._obey, action, *arguments)

    def _arrive(self, sent_for: float, action: Callable[..., None], *arguments: object) -> None:
        if sent_for <= self.cut_at:
            action(*arguments)

    def _obey(self, action: Callable[..., None], *arguments: object) -> None:
        if self.alive:
            action(*arguments)

    # ------------------------------------------------------------ orders

    def start(self, command: StartWorkers, place: Place, fabric: Fabric) -> None:
        for rank in place.ranks:
            worker = Worker(self, command.generation, rank, fabric)
            self.workers.append(worker)
            self.clock.after(self.clock.delay_s(0.05), worker.load, command.checkpoint, command.iteration)
        self.clock.after(self.clock.delay_s(0.02), self.send_started, command.generation)

    def send_started(self, generation: int) -> None:
        if any(worker.generation == generation for worker in self.workers):
            self.send(e.WorkersStarted(generation=generation, agent=self.name))
            self.driver.sim.moment("started")

    def stop(self, generation: int) -> None:
        for worker in self.workers:
            if worker.generation <= generation:
                worker.hand_over()
                worker.alive = False
        self.workers = [worker for worker in self.workers if worker.generation > generation]
        self.clock.after(self.clock.delay_s(0.02), self.send, e.WorkersStopped(generation=generation, agent=self.name))

    def settle(self, ticket: e.Ticket) -> None:
        for key in [key for key in self.staged if key[0] == ticket]:
            del self.staged[key]
        for worker in self.workers:
            if worker.alive and worker.generation == ticket.generation:
                worker.settled(ticket)

    def bury(self, worker: Worker, cause: str, error_type: str | None) -> None:
        if worker not in self.workers:
            return  # it was stopped meanwhile
        worker.hand_over()
        failure = WorkerFailure(rank=worker.rank, cause=cause, agent=self.name, error_type=error_type, error=cause)
        self.send(e.WorkerExited(generation=worker.generation, failure=failure))
        for peer in worker.fabric.workers:
            if worker.fabric.lockstep and peer.alive and self.clock.happens(0.5):
                peer.die("raised RuntimeError: Connection closed by peer", "RuntimeError")

    # ------------------------------------------------------------ the end

    def die(self) -> None:
        """The machine is gone: what it had sent may or may not arrive."""
        if self.alive:
            self._go()
            self.cut_at = min(self.cut_at, self.clock.now + self.clock.delay_s(self.scenario.message_s))
            self.clock.at(self.cut_at, self.driver.lose, self, "its connection closed")

    def cut(self) -> None:
        """The connection breaks; each side notices in its own time, and the node then ends itself."""
        if self.alive and self.cut_at == _FOREVER:
            self.cut_at = self.clock.now
            self.clock.after(self.clock.delay_s(1.0), self.driver.lose, self, "it was silent")
            self.clock.after(self.clock.delay_s(1.0), self._go)

    def _go(self) -> None:
        self.alive = False
        for worker in self.workers:
            worker.alive = False

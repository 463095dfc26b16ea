"""A model of a worker: it trains from what it loaded, reports each iteration, and finishes or dies.

It speaks to its agent, which is the real one, through a `Connection` that stands for their socket pair: what was sent
arrives also if the worker is dead by then. Parts are snapshots in the agent's real buffers.
"""

from __future__ import annotations

import json
import os
from collections import deque
from typing import TYPE_CHECKING

from tests.sim.data import Loader
from tests.sim.scenario import gain

from holdfast.agent.spawner import Parent
from holdfast.agent.worker_handle import OnMessage, WorkerHandle
from holdfast.core import events as e
from holdfast.core.checkpoint_types import MemoryFile, Report, Snapshot
from holdfast.core.commands import AnnounceCheckpoint, HoldReports
from holdfast.core.failure_kind import FailureKind
from holdfast.core.records import WorkerFailure
from holdfast.errors import CheckpointError
from holdfast.wire.messages import Collect, Collected, CollectiveKind, ToWorker, WorkerMessage, WorkerReport
from holdfast.worker.job import Assignment
from holdfast.worker.snapshot_buffer import HEADER_BYTES
from holdfast.worker.stdio import WorkerFds

if TYPE_CHECKING:
    from tests.sim.node import Node
    from tests.sim.validator import Validator

__all__ = ["Connection", "Fabric", "State", "Worker"]

_SLOW_READ_S = 0.05
_KILLED = 9
_FAILED = 1 << 8
State = tuple[int, int]
"""What a worker trains: the iteration, and the sum of all gains up to it."""


class Connection(WorkerHandle):
    """The agent's end of a worker that is no process; `number` stands for the worker's descriptors."""

    def __init__(self, node: Node, number: int, rank: int, on_message: OnMessage) -> None:
        super().__init__(rank, on_message)
        self.worker_fds = WorkerFds(number, -1, -1, -1)
        self.worker: Worker | Validator | None = None
        self._node = node
        self._unread: deque[WorkerMessage] = deque()

    def arrive(self, message: WorkerMessage) -> None:
        """The worker sent something; the agent reads it now, or when it has time."""
        self._unread.append(message)
        if len(self._unread) == 1:
            self._node.process.after(_SLOW_READ_S if self._node.scenario.batch > 1 else 0.0, self._read)

    def _read(self) -> None:
        while self._unread and self.alive:
            self.receive(self._unread.popleft())

    def send(self, message: ToWorker) -> None:
        if self.alive and self.worker is not None:
            self._node.process.after(0.0, self.worker.receive, message)

    def pause(self) -> None:
        """The controller never lags that much."""

    resume = pause

    async def dump_stacks(self) -> str:
        return ""

    def drain(self) -> None:
        self._read()
        self.alive = False

    def tell(self, text: str) -> None:
        """Nobody reads it."""

    def close_log(self) -> None:
        """Nobody prints anything."""

    @property
    def last_lines(self) -> tuple[str, ...]:
        return ()

    @property
    def _stacks(self) -> str | None:
        return None


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
    """One rank of one generation."""

    def __init__(
        self, node: Node, parent: Parent, assignment: Assignment, connection: Connection, fabric: Fabric
    ) -> None:
        self.parent = parent
        self.node, self.assignment, self.connection, self.fabric = node, assignment, connection, fabric
        self.generation, self.rank = assignment.generation, assignment.rank
        self.run = node.sim.run_at(assignment.storage)
        self.scenario = self.run.scenario
        self.iteration = self.sum = 0
        self.number = 0
        self.alive, self.killed = True, False
        self.hung, self.finished, self.idle, self.blocked = False, False, False, False
        self.unsettled: e.Ticket | None = None
        self.hold: int | None = None
        self.held = False
        """Whether it stays in its last report."""
        self.waits = False
        """Whether it waits in its last report for the checkpoint."""
        self.asked = self.stays = self.is_due = False
        """Of `should_checkpoint`: it was asked before the next report, and what was answered."""
        self.asks = 0
        self.state = bytearray()
        self.loader: Loader | None = None
        self.taken = 0
        """Of how many reports it has had the samples."""
        connection.worker = self

    async def train(self) -> None:
        """Load the checkpoint to start from, and begin to train."""
        try:
            (self.iteration, self.sum), saved = await self.node.load(self)
        except CheckpointError as error:
            if self.alive:
                failure = self._failure(str(error), type(error).__name__)
                failure = failure.__replace__(kind=FailureKind.DAMAGED, damaged_checkpoint=self.assignment.checkpoint)
                self.fail(failure)
            return
        if self.alive:
            if (data := self.scenario.data) is not None:
                self.loader = Loader(data, self.rank, self.fabric.world_size, saved)
            self.fabric.workers.append(self)
            self.soon()
            self.fabric.moved()

    @property
    def stays_in_report(self) -> bool:
        return self.held or self.waits

    def soon(self) -> None:
        self.node.after(self.scenario.step_s, self.advance)

    def advance(self) -> None:
        if not self.alive or self.hung or self.blocked or self.finished or self.stays_in_report:
            return
        if self.fabric.must_wait(self):
            self.idle = True
            return
        scenario = self.scenario
        if self.iteration >= scenario.iterations:
            self.finish()
            return
        iteration = self.iteration + 1
        if self.rank == 0 and scenario.poison.get(iteration, 0) > 0:
            scenario.poison[iteration] -= 1
            self.fail(self._failure(f"raised ValueError: step {iteration}", "ValueError"))
            return
        if scenario.asks and not self.asked:
            self._ask()
            return
        gives_part = scenario.gives_part(self.rank, self.fabric.world_size)
        part = (self.is_due or iteration % scenario.checkpoint_every == 0) and gives_part
        if part and self.unsettled is not None:
            self.blocked = True
            self.connection.arrive(e.WorkerWaited(generation=self.generation, rank=self.rank, waiting=True))
            return
        self.report(iteration, part)

    def report(self, iteration: int, part: bool) -> None:
        for peer in self.fabric.workers if self.fabric.lockstep else [self]:
            peer.take_samples(iteration)  # a collective needs those of all ranks
        self.iteration, self.number = iteration, self.number + 1
        self.sum += gain(iteration, self.run.number)
        if part:
            self.unsettled = e.Ticket(self.generation, self.number)
            self.node.sim.moment("part")
        is_whole = part and self.scenario.whole_parts
        metrics = {"sum": self.sum, "noise": gain(iteration) % 7} if self.rank == 0 or is_whole else None
        name = self.scenario.dir_name(iteration) if self.rank == 0 else None
        at = self.node.sim.loop.time()
        if self.hold is not None:
            self.held = self.stays or (part if self.hold == 0 else self.number >= self.hold)
        self.asked = self.stays = False
        self.waits = part and self.scenario.waits_for_commits
        report = Report(
            number=self.number,
            at=at,
            metrics=metrics,
            checkpoint=part,
            checkpoint_dir_name=name,
            needed_ranks=(self.rank,) if is_whole else None,
            worker_state=self.loader.save() if self.loader is not None else b"",
            held=self.held,
            waits=self.waits,
            validation=self.scenario.validation(iteration) if part else None,
        )
        self.connection.arrive(WorkerReport(report=report, part=self._snapshot() if part else None))
        if not self.stays_in_report:
            self.soon()
        self.fabric.moved()

    def take_samples(self, iteration: int) -> None:
        """Those that it trains on until it reports this iteration."""
        if self.loader is not None and self.taken < iteration and not self.finished:
            self.taken = iteration
            self.run.checkers.took(self, iteration, self.loader.take(iteration))

    def _snapshot(self) -> Snapshot:
        """Write the state to one of the buffers in turn: the other's snapshot may be the newest that is committed."""
        state = {"run": self.run.name, "iteration": self.iteration, "sum": self.sum}
        files = {f"rank_{self.rank}.json": json.dumps(state).encode()}
        if self.rank == 0:
            files["state.json"] = b"the same in every checkpoint"
        buffers = self.assignment.buffers
        path, seal = buffers[self.number % len(buffers)], next(self.node.sim.numbers) + 1
        placed: list[MemoryFile] = []
        offset = 0
        for name, data in files.items():
            placed.append(MemoryFile(name, offset, len(data)))
            offset += len(data)
        fd = os.open(path, os.O_RDWR)
        try:
            os.pwrite(fd, seal.to_bytes(8, "little"), 0)
            os.pwrite(fd, b"".join(files.values()), HEADER_BYTES)
        finally:
            os.close(fd)
        return Snapshot(buffer=path, seal=seal, files=placed)

    def _ask(self) -> None:
        if self.asks > self.number:
            return  # it waits for the answer
        self.asks = self.number + 1
        self.connection.arrive(
            Collect(
                generation=self.generation,
                rank=self.rank,
                sequence=self.asks,
                kind=CollectiveKind.CHECKPOINT_INTERVAL,
                data=self.asks,
            )
        )

    def receive(self, message: ToWorker) -> None:
        if isinstance(message, Collected) and self.alive:
            if message.generation == self.generation and message.sequence == self.asks and not self.asked:
                self.is_due, _, self.stays = message.data
                self.asked = True
                if self.stays:
                    self.hold = self.hold or 0
                self.advance()
            return
        if isinstance(message, HoldReports) and self.alive:
            self.hold = message.number
            if self.held and (self.hold is None or self.hold > self.number):
                self.held = False
                if not self.waits:
                    self.soon()
            return
        if not self.alive or not isinstance(message, AnnounceCheckpoint) or self.unsettled != message.ticket:
            return
        self.unsettled = None
        if self.waits:
            self.waits = False
            if not self.held:
                self.soon()
        if self.blocked:
            self.blocked = False
            self.connection.arrive(e.WorkerWaited(generation=self.generation, rank=self.rank, waiting=False))
            self.advance()

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        self.finished = True
        value = self.sum if self.rank == 0 else None
        self.connection.arrive(e.WorkerFinished(generation=self.generation, rank=self.rank, value=value))
        self.exit(0)
        self.fabric.moved()

    def fail(self, failure: WorkerFailure) -> None:
        self.connection.arrive(e.WorkerExited(generation=self.generation, failure=failure))
        self.exit(_FAILED)

    def kill(self) -> None:
        if self.alive:
            self.exit(_KILLED)

    def exit(self, status: int) -> None:
        """The agent hears of it from the kernel, after everything that the worker had sent."""
        self.alive = False
        self.node.after(0.002, self.node.reap, self, status)

    def lose_peer(self) -> None:
        if self.alive and self.node.process.is_alive:
            self.fail(self._failure("raised RuntimeError: Connection closed by peer", "RuntimeError"))

    def _failure(self, cause: str, error_type: str) -> WorkerFailure:
        return WorkerFailure(rank=self.rank, cause=cause, error_type=error_type, error=cause)

"""A node: a model of the agent and its workers. There are no processes here, but the messages are the real ones, and so
is what becomes of checkpoints: parts are uploaded, verified and recorded by `holdfast.checkpoint`.

A part that a worker has handed over outlives the worker, not the node. When the controller is gone, the workers die,
and the node finishes the uploads that it was told to make (as `agent.finish_uploads` does) before it ends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.memory_store import MemoryStore
from tests.sim.network import Connection, connect
from tests.sim.process import Process
from tests.sim.scenario import gain

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.digest import check_files
from holdfast.checkpoint.part_records import write_part_record
from holdfast.checkpoint.upload import upload_memory
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.checkpoint_types import FileEntry, Report
from holdfast.core.failure_kind import FailureKind
from holdfast.core.records import WorkerFailure
from holdfast.engines.engine import ControllerEndpoint
from holdfast.errors import CheckpointError, Damaged, HoldfastError, OutOfSpace, Unavailable, WireError
from holdfast.wire import messages as m
from holdfast.wire.channel import Channel

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

__all__ = ["Fabric", "Node", "Worker"]

_LINGER_S = 20.0


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

    def __init__(self, node: Node, generation: int, rank: int, fabric: Fabric, state: tuple[int, int]) -> None:
        self.node, self.generation, self.rank, self.fabric = node, generation, rank, fabric
        self.iteration, self.sum = state
        self.number = 0
        self.alive, self.hung, self.finished, self.idle = True, False, False, False
        self.blocked = False
        self.unsettled: e.Ticket | None = None
        self.batch: list[Report] = []
        fabric.workers.append(self)

    def soon(self) -> None:
        self.node.after(self.node.scenario.step_s, self.advance)

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
            self.node.sim.moment("part")
        metrics = {"sum": self.sum, "noise": gain(iteration) % 7} if self.rank == 0 else None
        name = self.node.scenario.dir_name(iteration) if self.rank == 0 else None
        at = self.node.sim.loop.time()
        self.batch.append(Report(number=self.number, at=at, metrics=metrics, checkpoint=part, checkpoint_dir_name=name))
        if len(self.batch) >= self.node.scenario.batch or part:
            self.hand_over()
        elif len(self.batch) == 1:
            self.node.process.after(0.05, self.hand_over)
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
        if self.alive and not self.finished:
            self.alive = False
            self.node.after(0.002, self.node.bury, self, cause, error_type)


class Node:
    """One agent with its workers, started by a driver's engine."""

    def __init__(self, sim: Simulation, name: str, host: str, slots: int, endpoint: ControllerEndpoint) -> None:
        self.sim, self.name, self.slots, self.endpoint = sim, name, slots, endpoint
        self.scenario = sim.scenario
        self.process = Process(sim, name, host)
        self.store = MemoryStore(sim.bucket, self.process.carry_out, "run")
        self.workers: list[Worker] = []
        self.staged: dict[tuple[e.Ticket, int], tuple[int, int]] = {}
        """The parts that workers have handed over: (iteration, sum) of each."""
        self.ordered: dict[tuple[e.Ticket, int], tuple[m.Upload, list[FileEntry] | None]] = {}
        """The uploads that were ordered and are not settled, with the files of those that are done."""
        self.connection: Connection | None = None
        self._channel: Channel[m.ControllerMessage] | None = None
        self._starting: tuple[int, asyncio.Task[None]] | None = None
        self._sent: list[tuple[tuple[int, int], m.AgentMessage]] = []
        self.process.on_death.append(self._died)
        self.process.spawn(self._run())

    # ------------------------------------------------------------ the connection

    async def _run(self) -> None:
        await asyncio.sleep(self.sim.delay_s(0.3))
        try:
            self._channel, self.connection = await connect(self.process, self.endpoint)
        except WireError:
            self.process.exit()
            return
        self._channel.send_nowait(e.AgentJoined(agent=self.name, host=self.process.host, slots=self.slots))
        while (message := await self._channel.recv()) is not None:
            self._take(message)
        await self.lose_controller()

    def send(self, message: m.AgentMessage) -> None:
        """To the controller; some are sent twice, and some once more when they are stale."""
        self._post(message)
        if self.sim.happens(self.scenario.repeats):
            self._post(message)
        if self.scenario.repeats and (age := _age(message)) is not None:
            self._sent.append((age, message))
            stale_age, stale = self.sim.random.choice(self._sent)
            if stale_age < age if isinstance(stale, m.Uploaded) else stale_age[0] < age[0]:
                self._post(stale)

    def _post(self, message: m.AgentMessage) -> None:
        if self._channel is not None:
            self._channel.send_nowait(message)

    def after(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        """About so many seconds later."""
        self.process.after(self.sim.delay_s(seconds), action, *arguments)

    def _take(self, message: m.ControllerMessage) -> None:
        match message:
            case m.Prepare():
                self.after(0.2, self.send, e.AgentPrepared(agent=self.name))
            case c.StartWorkers():
                self._starting = (message.generation, self.process.spawn(self._start(message)))
            case c.StopWorkers():
                self._stop(message.generation)
            case m.Upload():
                self._upload(message)
            case c.AnnounceCheckpoint():
                self._settle(message.ticket)
            case m.Ping():
                self._post(m.Pong())
            case m.Shutdown():
                self._kill_workers()
                self.after(0.1, self.process.exit)
            case _:
                return

    # ------------------------------------------------------------ generations

    async def _start(self, order: c.StartWorkers) -> None:
        state = (0, 0)
        if order.checkpoint is not None:
            try:
                state = await self._load(order.checkpoint)
            except CheckpointError as error:
                self.sim.checkers.not_loaded(self, order, error)
                why = str(error)
                damage = e.DamageFound(
                    generation=order.generation, agent=self.name, checkpoint=order.checkpoint, why=why
                )
                self.send(damage)
                return
            self.sim.checkers.loaded(order, state)
        fabric = self.sim.fabric(self.endpoint.address, order.generation, order.world_size)
        self.workers += [Worker(self, order.generation, rank, fabric, state) for rank in order.places[0].ranks]
        for worker in self.workers:
            worker.soon()
        fabric.moved()
        self.after(0.02, self._say_started, order.generation)

    async def _load(self, name: str) -> tuple[int, int]:
        """Verify a checkpoint and read the state in it; storage that does not answer is asked again."""

        def load() -> tuple[int, int]:
            manifest = Catalog(self.store).get(name)
            if problems := check_files(self.store, manifest, name=name, deep=True):
                raise Damaged(problems[0])
            first = next(entry.path for entry in manifest.files if entry.path.startswith("rank"))
            state = json.loads(self.store.get(f"{name}/{first}"))
            return state["iteration"], state["sum"]

        while True:
            try:
                return await asyncio.to_thread(load)
            except CheckpointError:
                raise
            except HoldfastError:
                await asyncio.sleep(0.2)

    def _say_started(self, generation: int) -> None:
        if any(worker.generation == generation for worker in self.workers):
            self.send(e.WorkersStarted(generation=generation, agent=self.name))
            self.sim.moment("started")

    def _stop(self, generation: int) -> None:
        if self._starting is not None and self._starting[0] <= generation:
            self._starting[1].cancel()
        for worker in self.workers:
            if worker.generation <= generation:
                worker.hand_over()
                worker.alive = False
        self.workers = [worker for worker in self.workers if worker.generation > generation]
        self.after(0.02, self.send, e.WorkersStopped(generation=generation, agent=self.name))

    def _kill_workers(self) -> None:
        if self._starting is not None:
            self._starting[1].cancel()
        for worker in self.workers:
            worker.alive = False

    def bury(self, worker: Worker, cause: str, error_type: str | None) -> None:
        if worker not in self.workers:
            return  # it was stopped meanwhile
        worker.hand_over()
        failure = WorkerFailure(rank=worker.rank, cause=cause, agent=self.name, error_type=error_type, error=cause)
        self.send(e.WorkerExited(generation=worker.generation, failure=failure))
        for peer in worker.fabric.workers:
            if worker.fabric.lockstep and peer.alive and self.sim.happens(0.5):
                peer.die("raised RuntimeError: Connection closed by peer", "RuntimeError")

    # ------------------------------------------------------------ parts

    def _upload(self, order: m.Upload) -> None:
        key = (order.ticket, order.rank)
        if key not in self.staged:
            self.sim.checkers.fail(f"{self.name} does not hold the part of rank {order.rank}")
        self.ordered[key] = (order, None)
        self.sim.locks.add(self._lock(order))
        self.process.spawn(self._store_part(order))

    async def _store_part(self, order: m.Upload) -> None:
        key = (order.ticket, order.rank)
        try:
            files = await asyncio.to_thread(self._put_files, order)
        except HoldfastError as error:
            self._post(
                m.UploadFailed(ticket=order.ticket, rank=order.rank, kind=FailureKind.of(error), error=str(error))
            )
            return
        if key in self.ordered:
            self.ordered[key] = (order, files)
        self.sim.moment("uploaded")
        self.send(m.Uploaded(ticket=order.ticket, rank=order.rank, files=files))

    def _put_files(self, order: m.Upload) -> list[FileEntry]:
        iteration, total = self.staged[order.ticket, order.rank]
        state = json.dumps({"iteration": iteration, "sum": total}).encode()
        files = {f"rank_{order.rank}.json": memoryview(state)}
        if order.rank == 0:
            files["constant.bin"] = memoryview(b"the same in every checkpoint")
        return upload_memory(
            self.store, order.draft, files, rank=order.rank, parent_files=order.parent_files, threads=1
        )

    def _settle(self, ticket: e.Ticket) -> None:
        for key in [key for key in self.staged if key[0] == ticket]:
            del self.staged[key]
        for key in [key for key in self.ordered if key[0] == ticket]:
            self.sim.locks.discard(self._lock(self.ordered.pop(key)[0]))
        for worker in self.workers:
            if worker.alive and worker.generation == ticket.generation:
                worker.settled(ticket)

    def _lock(self, order: m.Upload) -> tuple[str, str]:
        return self.process.host, f"agents/*/uploads/{order.draft.token}"

    # ------------------------------------------------------------ the end

    async def lose_controller(self) -> None:
        """It is gone: finish what it had ordered, leave records of that, and end."""
        self._kill_workers()
        give_up_at = self.sim.loop.time() + _LINGER_S
        while self.ordered and self.sim.loop.time() < give_up_at:
            key, (order, files) = next(iter(self.ordered.items()))
            try:
                if files is None:
                    files = await asyncio.to_thread(self._put_files, order)
                    self.ordered[key] = (order, files)
                await asyncio.to_thread(self._leave_record, order, files)
            except (Unavailable, OutOfSpace):
                await asyncio.sleep(0.3)
                continue
            except HoldfastError:
                pass
            self.sim.locks.discard(self._lock(order))
            self.ordered.pop(key, None)
        self.process.exit()

    def _leave_record(self, order: m.Upload, files: list[FileEntry]) -> None:
        assert order.info is not None
        write_part_record(self.store, order.draft, order.info, order.rank, files, generation=order.ticket.generation)

    def cut(self) -> None:
        """The connection breaks; the controller notices by its pings, the node in its own time."""
        if self.connection is not None and not self.connection.is_cut:
            self.connection.cut()
            self.process.after(self.sim.delay_s(2.0), lambda: self.process.spawn(self.lose_controller()))

    def _died(self) -> None:
        for worker in self.workers:
            worker.alive = False
        for order, _ in self.ordered.values():
            self.sim.locks.discard(self._lock(order))


def _age(message: m.AgentMessage) -> tuple[int, int] | None:
    """The generation and the report that a message is about."""
    if isinstance(message, m.Uploaded):
        return message.ticket.generation, message.ticket.number
    generation = getattr(message, "generation", None)
    return None if generation is None else (generation, 0)

"""A node: the agent that ships, on a platform without processes and sockets. Only workers are modelled (`worker`).

`Agent`, `RunHost`, `WorkerGroup`, `Parts`, `Buffers`, `RunStorage` and `finish_uploads` are the real ones. The platform
gives them a connection of the simulated network, the run's storage in memory, and a spawner whose workers are tasks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.sim.memory_store import MemoryStore
from tests.sim.neighbour import Neighbour, SnapshotServer
from tests.sim.network import Connection as NetworkConnection
from tests.sim.network import connect
from tests.sim.process import Process
from tests.sim.validator import Validator
from tests.sim.worker import Connection, State, Worker

from holdfast.agent.agent import Agent
from holdfast.agent.buffers import Buffers, SnapshotMemory
from holdfast.agent.function_memory import FunctionMemory
from holdfast.agent.output import RankLog
from holdfast.agent.parts import Ordered
from holdfast.agent.platform import MasterPort, Platform
from holdfast.agent.run_host import RunHost
from holdfast.agent.session_dir import RunDirectory, SessionDir
from holdfast.agent.snapshot_server import ServedSnapshots
from holdfast.agent.spawner import Parent
from holdfast.agent.worker_handle import OnMessage, WorkerHandle
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.digest import check_files
from holdfast.checkpoint.worker_states import WorkerStates, read_worker_states
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.engines.engine import ControllerEndpoint
from holdfast.errors import CheckpointError, Damaged, HoldfastError, WireError
from holdfast.runtime import current
from holdfast.storage.store import Store
from holdfast.streaming.messages import ServedStorage
from holdfast.streaming.server import StorageServer
from holdfast.wire import messages as m
from holdfast.wire.channel import Channel
from holdfast.wire.envelope import Envelope
from holdfast.wire.resumable_channel import ResumableChannel
from holdfast.worker.job import Assignment
from holdfast.worker.stdio import WorkerFds

if TYPE_CHECKING:
    from tests.sim.run import Run
    from tests.sim.simulation import Simulation

__all__ = ["Node"]

Loaded = tuple[State, WorkerStates | None]
"""What a generation begins with: its state, and where ranks were in their data."""
VALIDATION = "-validation-"
"""What the ids of validations have in the middle, as `holdfast.control.validation` names them."""
_LINGER_S = 20.0
_FORLORN_S = 30.0
_NEVER_REPEATED = (e.AgentJoined, m.Pong, m.UploadFailed, m.Logs)


class Node:
    """One agent with its workers, started by a driver's engine."""

    def __init__(self, sim: Simulation, name: str, host: str, slots: int, endpoint: ControllerEndpoint) -> None:
        self.sim, self.name, self.slots, self.endpoint = sim, name, slots, endpoint
        self.scenario = sim.scenario
        self.process = Process(sim, name, host)
        self.workers: list[Worker] = []
        """Those that were started and are not reaped."""
        self.validators: list[Validator] = []
        """The same of those that score checkpoints."""
        self.connections: list[Connection] = []
        """All that were ever opened."""
        self.commands: dict[tuple[str, int], c.StartWorkers] = {}
        """By the run's id and generation."""
        self.stopped: set[tuple[str, int]] = set()
        """The runs' ids and generations of which it has said that nothing is left."""
        self.connection: NetworkConnection | None = None
        self.lost_controller_at: float | None = None
        self.linger_s = _LINGER_S
        self.comes_back = sim.scenario.agents_come_back
        self.link_down_until = 0.0
        self.spawned: set[tuple[str, int, int]] = set()
        """The runs' ids, generations and ranks of all workers that it ever started."""
        self.validated: set[str] = set()
        """The ids of all validations that it ever began."""
        self._loads: dict[tuple[str, int], asyncio.Task[Loaded]] = {}
        self._buffers: list[Buffers] = []
        self.agent: Agent | None = None
        self.process.on_death.append(self._died)
        self.process.spawn(self._run())

    async def _run(self) -> None:
        self.agent = SimulatedAgent(self)
        try:
            await self.agent.run()
        except WireError as error:
            self.sim.say(self.name, "gives up: %s", error)
        except Exception as error:  # noqa: BLE001  no other may ever come out of it
            self.sim.fail(f"{self.name} failed: {error!r}")
        else:
            for run in self.sim.runs:
                run.checkers.agent_ended(self)
        self.process.exit()

    def after(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        """About so many seconds later."""
        self.process.after(self.sim.delay_s(seconds), action, *arguments)

    def store(self, storage: str) -> MemoryStore:
        """What a run's storage is to this process."""
        return MemoryStore(self.sim.bucket, self.process.carry_out, self.sim.run_at(storage).name)

    @property
    def is_connected(self) -> bool:
        """Whether neither side has given the connection up."""
        connection, channel = self.connection, None if self.agent is None else self.agent._channel
        is_open = self.process.is_alive and connection is not None and connection.is_open
        return is_open and channel is not None and channel.is_connected

    def ordered(self, run: Run) -> list[Ordered]:
        """The uploads of a run that the agent must finish even if the controller dies."""
        hosts = [] if self.agent is None else self.agent._runs.values()
        own = [one for one in hosts if one._order is not None and self.sim.run_at(one._order.storage) is run]
        return [one for host in own for one in host._storage.parts.ordered]

    # ------------------------------------------------------------ workers

    def start_worker(self, parent: Parent, assignment: Assignment, connection: Connection) -> None:
        run = self.sim.run_at(assignment.storage)
        if VALIDATION in assignment.run:
            run.checkers.validates(self, assignment)
            self.validators.append(Validator(self, parent, assignment, connection))
            self.after(0.02, self._validator_forked, self.validators[-1])
            return
        run.checkers.spawned(self, assignment)
        fabric = self.sim.fabric(self.endpoint.address, run, assignment.generation, assignment.world_size)
        worker = Worker(self, parent, assignment, connection, fabric)
        self.workers.append(worker)
        self.after(0.02, self._forked, worker)

    def _forked(self, worker: Worker) -> None:
        if worker in self.workers:
            worker.parent.worker_started(worker.generation, worker.rank, 1000 + worker.rank)
            if worker.alive:
                self.process.spawn(worker.train())
                self.sim.break_worker(worker)

    def _validator_forked(self, validator: Validator) -> None:
        if validator in self.validators:
            validator.parent.worker_started(validator.generation, validator.rank, 2000)
            self.process.spawn(validator.work())

    def reap_validator(self, validator: Validator, status: int) -> None:
        """Its process is gone."""
        if validator in self.validators:
            self.validators.remove(validator)
            validator.parent.worker_died(validator.generation, validator.rank, status, killed=validator.killed)

    def read_state(self, data: bytes) -> State:
        """What a file of a checkpoint says."""
        return _state(data)

    def reap(self, worker: Worker, status: int) -> None:
        """The worker's process is gone."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        worker.parent.worker_died(worker.generation, worker.rank, status, killed=worker.killed)
        for peer in worker.fabric.workers if status and not worker.killed else ():
            if worker.fabric.lockstep and peer.alive and self.sim.happens(0.5):
                peer.node.process.call(peer.lose_peer)

    async def load(self, worker: Worker) -> Loaded:
        """The state to start from: of the checkpoint's snapshot in this node's memory, or of its files in storage."""
        assignment = worker.assignment
        name, key = assignment.checkpoint, (assignment.run, assignment.generation)
        if name is None:
            return (0, 0), None
        if key not in self._loads:
            self._loads[key] = self.process.spawn(self._load(worker.run, name, assignment))
        state, saved = await asyncio.shield(self._loads[key])
        assert isinstance(worker.parent, RunHost)
        buffers = worker.parent._buffers  # a rank that trains already may have used one again: its seal says so
        for snapshot in filter(buffers.is_intact, assignment.snapshots):
            for path, data in buffers.files(snapshot).items():
                stored = self.sim.bucket.objects.get(f"{worker.run.name}/{name}/{path}", bytes(data))
                if bytes(data) != stored:
                    worker.run.checkers.fail(f"{path} of {name} is {bytes(data)!r} in memory and {stored!r} in storage")
        return state, saved

    async def _load(self, run: Run, name: str, assignment: Assignment) -> Loaded:
        """Verify a checkpoint and read the state in it; storage that does not answer is asked again."""
        store, command = self.store(assignment.storage), self.commands[assignment.run, assignment.generation]

        def load() -> Loaded:
            manifest = Catalog(store).get(name)
            if problems := check_files(store, manifest, name=name, deep=True):
                raise Damaged(problems[0])
            first = next(entry.path for entry in manifest.files if entry.path.startswith("rank"))
            saved = read_worker_states(store, name) if run.scenario.data is not None else None
            return _state(store.get(f"{name}/{first}")), saved

        while True:
            try:
                loaded = await asyncio.to_thread(load)
                run.checkers.loaded(command, loaded[0])
                return loaded
            except CheckpointError as error:
                run.checkers.not_loaded(self, command, error)
                raise
            except HoldfastError:
                await asyncio.sleep(0.2)

    # ------------------------------------------------------------ faults

    def cut(self) -> None:
        """The connection breaks; the controller notices by its pings, the node in its own time."""
        if self.connection is not None and not self.connection.is_cut:
            self.connection.cut()
            self.process.after(self.sim.delay_s(2.0), self.connection.client.lose)

    def blink(self, down_s: float) -> None:
        """The connection breaks, and another is possible after a while. Either side notices, or neither; what was on
        its way is lost, or arrives late."""
        connection, sim = self.connection, self.sim
        if connection is None or not connection.is_open:
            return
        self.link_down_until = sim.loop.time() + down_s
        way = sim.random.choice(["silent", "noticed", "reset", "late"])
        if way == "late":
            connection.delay(down_s + sim.delay_s(1.0))
        else:
            connection.cut()
        if way != "silent":
            self.process.after(sim.delay_s(0.5), connection.client.lose)
        if way == "reset":
            connection.server.process.after(sim.delay_s(0.5), connection.server.lose)

    def add_buffers(self, buffers: Buffers) -> None:
        self._buffers.append(buffers)

    def end_if_forlorn(self) -> None:
        """Whoever started an agent ends it when its driver will not come back."""
        listener, lost_at = self.sim.listeners[self.endpoint.address], self.lost_controller_at
        if not listener.process.is_alive and lost_at is not None and self.sim.loop.time() > lost_at + _FORLORN_S:
            assert self.agent is not None
            self.agent.shut_down(0.0)

    def free_memory(self) -> None:
        """As the kernel does when the process is gone."""
        for buffers in self._buffers:
            buffers.close()
        for function in [] if self.agent is None else self.agent._functions.values():
            function.close()

    def _died(self) -> None:
        for worker in self.workers:
            worker.alive = False
        for validator in self.validators:
            validator.alive = False
        self.workers.clear()
        self.validators.clear()
        self.free_memory()


def _state(data: bytes) -> State:
    found = json.loads(data)
    return found["iteration"], found["sum"]


class SimulatedAgent(Agent):
    """The real agent, with the checkers looking on."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name, node.slots, SimulatedPlatform(node))
        self._node = node

    async def _offer_again(self, channel: ResumableChannel[m.ControllerMessage]) -> m.ChannelOpened | None:
        if ranks := [worker.rank for worker in self._node.workers] + [one.rank for one in self._node.validators]:
            self._node.sim.fail(f"{self._node.name} offers itself to a controller while its ranks {ranks} live")
        return await super()._offer_again(channel)

    async def _forget_runs(self) -> None:
        for run in self._node.sim.runs:
            run.checkers.agent_ended(self._node)
        await super()._forget_runs()


class SimulatedPlatform(Platform):
    """What the agent is given instead of the real machine."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.endpoint.address, node.endpoint.secret)
        self.linger_s = node.linger_s
        self._node = node

    def find_resources(self) -> tuple[dict[str, float], tuple[str, ...]]:
        return {}, ()

    async def connect(self, agent: str) -> Channel[m.ControllerMessage]:
        node = self._node
        await asyncio.sleep(node.sim.delay_s(0.3))
        if node.sim.loop.time() < node.link_down_until:
            raise WireError("The network is unreachable.")
        try:
            channel, node.connection = await connect(node.process, node.endpoint)
        except WireError:
            node.end_if_forlorn()
            raise
        node.lost_controller_at = None
        return channel

    def make_channel(self, agent: str) -> ResumableChannel[m.ControllerMessage]:
        return NodeChannel(self._node)

    def open_session(self, agent: str) -> SessionDir:
        return SimulatedSession(agent)

    def open_snapshot_memory(self) -> SnapshotMemory:
        return SnapshotMemory(1 << 30)

    def make_buffers(self, slots: int, memory: SnapshotMemory) -> Buffers:
        buffers = Buffers(slots, memory)
        self._node.add_buffers(buffers)
        return buffers

    def make_spawners(self, session: SessionDir) -> SimulatedSpawners:
        return SimulatedSpawners(self._node)

    def open_worker(
        self, assignment: Assignment, log: RankLog, listen_fd: int | None, on_message: OnMessage
    ) -> WorkerHandle:
        connections = self._node.connections
        connections.append(Connection(self._node, len(connections), assignment.rank, on_message))
        return connections[-1]

    def open_master_port(self, address: str) -> MasterPort:
        return SimulatedPort()

    def open_store(self, order: m.PrepareRun) -> Store:
        return self._node.store(order.storage)

    def sees_storage(self, probe: m.StorageProbe) -> bool:
        return self._node.sim.happens(0.2)

    def find_server(self, answer: m.StorageServed) -> ServedStorage:
        return ServedStorage(root=answer.root, host="driver", port=answer.port, key=answer.key)

    @asynccontextmanager
    async def find_next_server(self, root: str, tokens: Sequence[str]) -> AsyncIterator[ServedStorage | None]:
        yield ServedStorage(root=root, host="driver", port=1, key="key")

    def open_streamed(self, order: m.PrepareRun, find_server: Callable[[], ServedStorage]) -> Store:
        return self._node.store(order.storage)

    def serve_snapshots(self, files: ServedSnapshots, address: str, key: str) -> StorageServer:
        sim = self._node.sim
        server = SnapshotServer(self._node.process, files, len(sim.snapshot_servers) + 1)
        sim.snapshot_servers[server.port] = server
        return server  # type: ignore[return-value]  # as much of one as agents use

    def open_neighbour(self, neighbour: c.Neighbour, key: str, token: str) -> Neighbour:
        server = self._node.sim.snapshot_servers[neighbour.port]
        return Neighbour(self._node.process, server, token)

    def oom_kills(self) -> int:
        return 0

    def sweep_cache(self) -> None:
        """There is no cache."""

    def outlive_controller(self) -> None:
        self._node.lost_controller_at = self._node.sim.loop.time()


class SimulatedSession(SessionDir):
    """Directories that are never made."""

    def __init__(self, agent: str) -> None:
        self.path = Path("agents", agent)
        self.temp_link = None

    def run(self, run: str) -> RunDirectory:
        return SimulatedDirectory(self, run)

    def make_temporary(self) -> Path:
        return self.path / "tmp"

    def take_back(self, temporary: Path) -> bool:
        return True

    def renew_times(self) -> None:
        """Nothing grows old."""

    def remove(self) -> None:
        """Nothing is there."""


class SimulatedDirectory(RunDirectory):
    """Directories that are never made."""

    def make_work_dir(self, path: Path) -> None:
        """Nobody works there."""

    def remove(self) -> None:
        """Nothing is there."""


class SimulatedPort(MasterPort):
    """A port that nobody listens at."""

    def __init__(self) -> None:
        super().__init__("")

    def _bind(self) -> Any:
        return None

    @property
    def number(self) -> int:
        return 0

    def hand_over(self, number: int) -> int | None:
        return None

    def close(self) -> None:
        """Nothing is open."""


class SimulatedSpawners:
    """What the spawners of a node's runs share: nothing."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._spawners: list[SimulatedSpawner] = []

    def spawner(self, run: str, parent: Parent) -> SimulatedSpawner:
        self._spawners.append(SimulatedSpawner(self._node, parent))
        return self._spawners[-1]

    async def close(self) -> None:
        for spawner in self._spawners:
            await spawner.clear(0)


class SimulatedSpawner:
    """Starts one run's workers, which are tasks, and kills them."""

    def __init__(self, node: Node, parent: Parent) -> None:
        self._node, self._parent = node, parent

    async def prepare(self, function: FunctionMemory, order: m.PrepareRun) -> str | None:
        await asyncio.sleep(self._node.sim.delay_s(0.2))
        return None

    async def ready(self) -> None:
        if self._node.sim.happens(0.3):
            await asyncio.sleep(self._node.sim.delay_s(0.2))  # another zygote has to be started

    def spawn(self, assignment: Assignment, worker_fds: WorkerFds) -> None:
        self._node.start_worker(self._parent, assignment, self._node.connections[worker_fds.connection])

    async def clear(self, generation: int) -> None:
        for worker in self._own_workers():
            worker.killed = worker.killed or worker.alive
            worker.alive = False
        for validator in self._own_validators():
            validator.killed = validator.killed or validator.alive
            validator.alive = False
        await asyncio.sleep(self._node.sim.delay_s(0.02))
        for worker in self._own_workers():
            self._node.reap(worker, 9)
        for validator in self._own_validators():
            self._node.reap_validator(validator, 9)

    def _own_workers(self) -> list[Worker]:
        return [worker for worker in self._node.workers if worker.parent is self._parent]

    def _own_validators(self) -> list[Validator]:
        return [one for one in self._node.validators if one.parent is self._parent]

    def add_imports(self, modules: list[str]) -> None:
        """Nobody imports anything."""

    def release(self) -> None:
        """Nothing is held."""


class NodeChannel(ResumableChannel[m.ControllerMessage]):
    """The agent's real channel. Some messages are sent twice, and some once more when they are stale."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name, current().token_hex(8), comes_back=node.comes_back)
        self.node = node
        self._aged: list[tuple[tuple[int, int], m.AgentMessage, str]] = []

    def send_nowait(self, message: Any, run: str = "") -> None:
        super().send_nowait(message, run)
        node, sim = self.node, self.node.sim
        if (host := node.agent._runs.get(run) if node.agent is not None else None) is not None:
            assert host._order is not None
            sim.run_at(host._order.storage).checkers.sent(node, message)
        if isinstance(message, m.Uploaded):
            sim.moment("uploaded")
        elif isinstance(message, e.WorkersStarted):
            sim.moment("started")
        elif isinstance(message, e.WorkersStopped):
            node.stopped.add((run, message.generation))
        if not node.scenario.repeats or isinstance(message, _NEVER_REPEATED):
            return
        if sim.happens(node.scenario.repeats):
            super().send_nowait(message, run)
        if (age := _age(message)) is not None:
            self._aged.append((age, message, run))
            stale_age, stale, stale_run = sim.random.choice(self._aged)
            if stale_age < age if isinstance(stale, m.Uploaded) else stale_age[0] < age[0]:
                super().send_nowait(stale, stale_run)

    async def recv(self) -> Envelope[m.ControllerMessage] | None:
        envelope = await super().recv()
        if envelope is not None and isinstance(envelope.message, c.StartWorkers):
            self.node.commands[envelope.run, envelope.message.generation] = envelope.message
        if envelope is not None and not isinstance(envelope.message, m.Ping):
            self.node.sim.moment("received")
        return envelope


def _age(message: m.AgentMessage) -> tuple[int, int] | None:
    """The generation and the report that a message is about."""
    if isinstance(message, m.Uploaded):
        return message.ticket.generation, message.ticket.number
    generation = getattr(message, "generation", None)
    return None if generation is None else (generation, 0)

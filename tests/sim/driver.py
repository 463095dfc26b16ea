"""A driver: a process that calls `fit()`, for several runs in as many threads.

The lease, the journal, the hub, the controller and all below them are the real ones. `Guest._fit` does what
`control.run.run_training` does, on the virtual loop. The controller is watched, not changed: every step of its machine
and every command is shown to the checkers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.sim.engine import SimulatedEngine
from tests.sim.memory_store import MemoryStore
from tests.sim.network import Listener
from tests.sim.process import Process

from holdfast.control.agent_link import Preparation
from holdfast.control.fingerprint import Fingerprint
from holdfast.control.group_commit import GroupCommit, RunJournal
from holdfast.control.history import RUN_FILE, read_history
from holdfast.control.hub import Hub
from holdfast.control.lease import Lease, acquire
from holdfast.control.loop import Controller, ControllerSetup, Settings
from holdfast.control.publisher import Publisher
from holdfast.control.request import RunContext, TrainRequest
from holdfast.control.setup import make_setup, write_run_file
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.admission import Gang
from holdfast.core.checkpoint_types import ValidationTask
from holdfast.core.invariants import Monitor
from holdfast.core.machine import Step
from holdfast.core.state import Durable, fold
from holdfast.engines.engine import ControllerEndpoint, OnChange
from holdfast.errors import Fenced, HoldfastError, RunBusy
from holdfast.journal.fold import FoldWriter
from holdfast.journal.writer import Journal
from holdfast.storage.retry import RetryingStore
from holdfast.storage.store import Store
from holdfast.wire.channel import CheckHello, OnAgent
from holdfast.wire.messages import LogLine, PrepareFunction, PrepareRun, StorageProbe, StorageServed, UploadFailed

if TYPE_CHECKING:
    from tests.sim.run import Run
    from tests.sim.simulation import Simulation

__all__ = ["Driver", "Guest"]

_FOLD_BYTES = 2_000
"""A fold is written after about ten records, so that most takeovers read one."""


class Driver:
    """One process, with the hub that its runs share."""

    def __init__(self, sim: Simulation, number: int, host: str, runs: Sequence[Run], *, takeover: bool) -> None:
        self.sim, self.takeover = sim, takeover
        self.process = Process(sim, f"driver-{number}", host)
        self.guests = {run: Guest(self, run) for run in runs}
        self.working = len(runs)
        """How many guests have not ended."""
        self._hub: tuple[Hub, asyncio.Task[None]] | None = None
        self._users = 0
        self.process.on_death.append(self._died)
        for guest in self.guests.values():
            self.process.spawn(guest.main())

    async def join_hub(self) -> Hub:
        """The hub, made by the first guest (see `control.hub_thread`)."""
        self._users += 1
        if self._hub is None:
            hub = Hub(listen=self._listen, make_engine=self._make_engine, agent_silence_s=8.0)
            hub._storage_servers = _SimulatedStorageServers()  # type: ignore[assignment]
            self._hub = (hub, asyncio.ensure_future(hub.open()))
        hub, opening = self._hub
        await opening
        return hub

    async def leave_hub(self) -> None:
        """The last guest ends the hub; who comes then makes another."""
        self._users -= 1
        if self._users == 0 and self._hub is not None:
            hub, self._hub = self._hub[0], None
            await hub.close()

    def _make_engine(self, endpoint: ControllerEndpoint, on_change: OnChange) -> SimulatedEngine:
        return SimulatedEngine(self, endpoint, on_change)

    async def _listen(self, host: str, port: int, secret: str, on_agent: OnAgent, check_hello: CheckHello) -> Listener:
        return Listener(self.process, secret, on_agent)

    def _died(self) -> None:
        for guest in self.guests.values():
            guest.status = guest.status or "killed"
        self.sim.ended(self)


class Guest:
    """One call of `fit()`."""

    def __init__(self, driver: Driver, run: Run) -> None:
        self.driver, self.run = driver, run
        self.sim, self.process, self.checkers = driver.sim, driver.process, run.checkers
        self.store = self._open_store()
        self.status = ""
        """How it ended; "" as long as it runs."""
        self.address = ""
        """Of the hub."""
        self.lease: Lease | None = None
        self.controller: WatchedController | None = None

    @property
    def epoch(self) -> int:
        assert self.lease is not None
        return self.lease.epoch

    def _open_store(self) -> Store:
        store = MemoryStore(self.sim.bucket, self.process.carry_out, self.run.name)
        if not self.sim.scenario.retries:
            return store
        return RetryingStore(store, 3, 0.1, 1.0, sleep=self.process.sleep, uniform=self.process.random.uniform)

    async def main(self) -> None:
        try:
            status = await self._fit()
        except Fenced:
            status = "fenced"
        except RunBusy:
            status = "busy"
        except HoldfastError as error:
            status = f"not started: {error}" if self.controller is None else "unwritten"
        except Exception as error:  # noqa: BLE001  no other may ever come out of `fit()`
            self.checkers.fail(str(error) if isinstance(error, AssertionError) else repr(error))
        self.driver.working -= 1
        if self.driver.working:
            self.status = status
            return
        while self.process.busy_threads:
            await asyncio.sleep(0.1)  # as `asyncio.run` waits for its threads
        self.status = status
        self.process.exit()

    async def _fit(self) -> str:
        store = self.store
        history = await asyncio.to_thread(read_history, store)
        if isinstance(history.durable.outcome, r.RunFinished):
            return "finished"
        await asyncio.to_thread(write_run_file, _request(self.run), store)
        lease = await asyncio.to_thread(partial(acquire, store, takeover=self.driver.takeover, with_keys=[RUN_FILE]))
        self.lease = lease
        try:
            plan = await asyncio.to_thread(self._set_up, lease)
            journal = Journal(store, lease.epoch, lease.id)
            assert plan.fold_writer is not None
            journal.on_loss = plan.fold_writer.ask
            commit = GroupCommit(journal)
            hub = await self.driver.join_hub()
            self.address = hub._endpoint.address
            self.controller = WatchedController(self, plan, lease, RunJournal(commit, plan.run_id), hub)
            status = await self.controller.run()
            await self.driver.leave_hub()
            await asyncio.to_thread(commit.close)
            await asyncio.to_thread(plan.fold_writer.flush)
            # An end that could not be written down is no end: the same call continues.
            return "unwritten" if self.controller.journal_lost else status
        finally:
            await asyncio.to_thread(lease.release)

    def _set_up(self, lease: Lease) -> ControllerSetup:
        scenario = self.run.scenario
        history = read_history(self.store)
        self.checkers.read_history(self, history.durable)
        plan = make_setup(_request(self.run), _preparation(self.run), self.store, history, lease, lambda *_: [])
        plan.state.spec = scenario.spec
        plan.settings = Settings(
            flush_s=scenario.flush_s,
            storage_patience_s=scenario.patience_s,
            beat_s=scenario.beat_s,
        )
        plan.gang = Gang(
            run=plan.run_id,
            workers=scenario.spec.workers_max,
            min_workers=scenario.spec.workers_min,
            workers_per_agent=scenario.slots_per_node,
            spares=scenario.spec.spares,
        )
        if scenario.validates:
            plan.prepare_validation = partial(_prepare_validation, self.run)
        plan.make_publisher = partial(_SimulatedPublisher, self.process)
        assert plan.fold_writer is not None
        plan.fold_writer.least_bytes = _FOLD_BYTES
        self.checkers.began(self)
        return plan


class WatchedController(Controller):
    """The real controller, with the checkers looking on."""

    def __init__(self, guest: Guest, plan: ControllerSetup, lease: Lease, journal: RunJournal, hub: Hub) -> None:
        super().__init__(plan, lease, journal, hub)
        self._guest = guest
        self._checkers = guest.checkers
        self._monitor = Monitor(plan.state)
        self._shadow = _copy(plan.state.durable)

    @property
    def durable(self) -> Durable:
        return self._state.durable

    @property
    def agents(self) -> Collection[str]:
        """Those on which it has places."""
        return self._agents.links.keys()

    def ready_elsewhere(self, host: str) -> int:
        """How many of its workers could run on agents that are not on this host, nor about to be taken away."""
        found = [one for one in self._state.agents.values() if one.host != host]
        return sum(one.slots for one in found if one.prepared and not one.draining)

    def room(self) -> int:
        """How many workers agents have places for that are ready, and not about to be taken away."""
        return self.ready_elsewhere("")

    def awaits(self, message: UploadFailed) -> bool:
        """Whether the answer to an upload counts: of a checkpoint that was given up it does not."""
        return message.ticket in self._state.pending

    def drain(self, agent: str, deadline_s: float | None) -> None:
        """`holdfast drain`."""
        self._agents.drain_node(agent, "drill", deadline_s)

    @property
    def journal_lost(self) -> bool:
        return self._journal_lost is not None

    def _step(self, event: e.Event, now: float) -> Step:
        decided = super()._step(event, now)
        self._guest.sim.say(
            self._guest.process.name, "%s -> %s", event, [type(one).__name__ for one in decided.commands]
        )
        self._monitor.after(decided, now)
        for record in decided.records:
            fold(self._shadow, record)
        self._checkers.stepped(self._guest, event, decided, self._shadow, now)
        return decided

    def _do(self, command: c.Command) -> None:
        if isinstance(command, c.StartWorkers):
            self._checkers.starting(self._guest, command)
        if isinstance(command, c.SetHostAside):
            self._checkers.sets_aside(self._guest, command)
        super()._do(command)


def _copy(durable: Durable) -> Durable:
    from copy import deepcopy

    return deepcopy(durable)


class _SimulatedPublisher(Publisher):
    """Shows records to the fold writer as the real publisher does, but from a simulated thread."""

    def __init__(self, process: Process, observers: Sequence[Any], read_back: Any) -> None:
        super().__init__([])
        (self._fold_writer,) = observers
        assert isinstance(self._fold_writer, FoldWriter)
        self._released: list[r.Record] = []
        self._task = process.spawn(self._work())

    @property
    def has_observers(self) -> bool:
        return True

    def release(self) -> None:
        self._released += self._held
        self._held = []

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        """Nobody prints anything."""

    def close(self) -> None:
        self.release()
        self._task.cancel()
        for record in self._released:
            self._fold_writer.record(record)

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            released, self._released = self._released, []
            if released:
                await asyncio.to_thread(self._show, released)

    def _show(self, records: list[r.Record]) -> None:
        for record in records:
            self._fold_writer.record(record)
        self._fold_writer.flush()


class _SimulatedStorageServers:
    """Nodes that do not see the storage reach it as all others do (`node.SimulatedPlatform.open_streamed`)."""

    async def serve(self, root: str) -> StorageServed:
        return StorageServed(root=root, port=1, key="key")

    async def close(self) -> None:
        """Nothing was started."""


def _prepare_validation(run: Run, task: ValidationTask) -> tuple[Preparation, float | None]:
    return _preparation(run, "v"), None


def _preparation(run: Run, function: str = "f") -> Preparation:
    """The functions are the same for all runs."""
    order = PrepareRun(
        function_key=function,
        workers=16,
        storage=f"memory://{run.name}",
        experiment=run.name,
        trial_id=run.name,
        trial_dir=run.name,
        work_dir=run.name,
        probe=StorageProbe(root=run.name, file=run.name, text=run.name) if run.scenario.streams else None,
        snapshot_key="key" if run.scenario.streams else "",
    )
    return Preparation(PrepareFunction(key=function, function=b"", sys_path=[], environment={}), order)


def _request(run: Run) -> TrainRequest:
    rule = run.scenario.spec.retention
    context = RunContext(
        name=run.name,
        storage_path="memory://",
        trainer_name="Trainer",
        train_loop_config=None,
        scaling_config=None,
        run_config=None,
    )
    return TrainRequest(
        job=None,  # type: ignore[arg-type]
        trainer_name="Trainer",
        storage_path="memory://",
        filesystem=None,
        name=run.name,
        min_workers=1,
        max_workers=1,
        local_mode=False,
        nodes=1,
        max_failures=0,
        max_preemption_failures=-1,
        progress_timeout_s=None,
        num_to_keep=rule.num_to_keep,
        score_attribute=rule.score_attribute,
        score_order="max",
        takeover=False,
        resume="auto",
        sync_artifacts=False,
        sync_period_s=300.0,
        sync_artifacts_on_checkpoint=False,
        callbacks=(),
        run_context=context,
        preload=(),
        fingerprint=Fingerprint(),
        params={},
    )

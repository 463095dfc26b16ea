"""A driver: a process that calls `fit()`. The lease, the journal, the controller and all below them are the real ones.

`_fit` does what `control.run.run_training` does, on the virtual loop. The controller is watched, not changed: every
step of its machine and every command is shown to the checkers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.sim.engine import SimulatedEngine
from tests.sim.memory_store import MemoryStore
from tests.sim.network import Listener
from tests.sim.process import Process

from holdfast.control.agent_link import Preparation
from holdfast.control.fingerprint import Fingerprint
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
from holdfast.core.invariants import Monitor
from holdfast.core.machine import Step
from holdfast.core.state import Durable, fold
from holdfast.engines.engine import ControllerEndpoint, OnGone
from holdfast.errors import Fenced, HoldfastError, RunBusy
from holdfast.journal.fold import FoldWriter
from holdfast.journal.writer import Journal
from holdfast.storage.retry import RetryingStore
from holdfast.storage.store import Store
from holdfast.wire.channel import OnAgent
from holdfast.wire.messages import LogLine, PrepareFunction, PrepareRun

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

__all__ = ["Driver"]

_PREPARATION = Preparation(
    PrepareFunction(key="f", function=b"", sys_path=[], environment={}),
    PrepareRun(
        function_key="f",
        workers=16,
        storage="memory://run",
        experiment="run",
        trial_id="run",
        trial_dir="run",
        work_dir="run",
    ),
)
_FOLD_BYTES = 2_000
"""A fold is written after about ten records, so that most takeovers read one."""


class Driver:
    """One process that called `fit()`."""

    def __init__(self, sim: Simulation, number: int, host: str, *, takeover: bool) -> None:
        self.sim, self.number, self.takeover = sim, number, takeover
        self.process = Process(sim, f"driver-{number}", host)
        self.store = self._open_store()
        self.status = ""
        """How it ended; "" as long as it runs."""
        self.lease: Lease | None = None
        self.controller: WatchedController | None = None
        self.process.on_death.append(self._died)
        self.process.spawn(self._main())

    @property
    def epoch(self) -> int:
        assert self.lease is not None
        return self.lease.epoch

    def _open_store(self) -> Store:
        store = MemoryStore(self.sim.bucket, self.process.carry_out, "run")
        if not self.sim.scenario.retries:
            return store
        return RetryingStore(store, 3, 0.1, 1.0, sleep=self.process.sleep, uniform=self.process.random.uniform)

    async def _main(self) -> None:
        try:
            status = await self._fit()
        except Fenced:
            status = "fenced"
        except RunBusy:
            status = "busy"
        except HoldfastError as error:
            status = f"not started: {error}" if self.controller is None else "unwritten"
        except Exception as error:  # noqa: BLE001  no other may ever come out of `fit()`
            self.sim.checkers.fail(str(error) if isinstance(error, AssertionError) else repr(error))
        while self.process.busy_threads:
            await asyncio.sleep(0.1)  # as `asyncio.run` waits for its threads
        self.status = status
        self.process.exit()

    async def _fit(self) -> str:
        store = self.store
        history = await asyncio.to_thread(read_history, store)
        if isinstance(history.durable.outcome, r.RunFinished):
            return "finished"
        await asyncio.to_thread(write_run_file, _request(self.sim), store)
        lease = await asyncio.to_thread(partial(acquire, store, takeover=self.takeover, with_keys=[RUN_FILE]))
        self.lease = lease
        try:
            plan = await asyncio.to_thread(self._set_up, lease)
            journal = Journal(store, lease.epoch, lease.id, plan.run_id)
            journal.on_loss = plan.fold_writer.ask
            hub = Hub(listen=self._listen, make_engine=self._make_engine, agent_silence_s=8.0)
            await hub.open()
            self.controller = WatchedController(self, plan, lease, journal, hub)
            status = await self.controller.run()
            await hub.close()
            await asyncio.to_thread(journal.close)
            await asyncio.to_thread(plan.fold_writer.flush)
            # An end that could not be written down is no end: the same call continues.
            return "unwritten" if self.controller.journal_lost else status
        finally:
            await asyncio.to_thread(lease.release)

    def _set_up(self, lease: Lease) -> ControllerSetup:
        sim, scenario = self.sim, self.sim.scenario
        history = read_history(self.store)
        sim.checkers.read_history(self, history.durable)
        plan = make_setup(_request(sim), _PREPARATION, self.store, history, lease, lambda *_: [])
        plan.state.spec = scenario.spec
        plan.settings = Settings(
            flush_s=scenario.flush_s,
            storage_patience_s=scenario.patience_s,
            beat_s=scenario.beat_s,
        )
        plan.gang = Gang(run=plan.run_id, workers=scenario.spec.workers_max, workers_per_agent=scenario.slots_per_node)
        plan.make_publisher = partial(_SimulatedPublisher, self.process)
        plan.fold_writer.least_bytes = _FOLD_BYTES
        sim.checkers.began(self)
        return plan

    def _make_engine(self, endpoint: ControllerEndpoint, on_gone: OnGone) -> SimulatedEngine:
        return SimulatedEngine(self, endpoint, on_gone)

    async def _listen(self, token: str, on_agent: OnAgent) -> Listener:
        return Listener(self.process, token, on_agent)

    def _died(self) -> None:
        self.status = self.status or "killed"
        self.sim.ended(self)


class WatchedController(Controller):
    """The real controller, with the checkers looking on."""

    def __init__(self, driver: Driver, plan: ControllerSetup, lease: Lease, journal: Journal, hub: Hub) -> None:
        super().__init__(plan, lease, journal, hub)
        self._driver = driver
        self._checkers = driver.sim.checkers
        self._monitor = Monitor(plan.state)
        self._shadow = _copy(plan.state.durable)

    @property
    def durable(self) -> Durable:
        return self._state.durable

    @property
    def journal_lost(self) -> bool:
        return self._journal_lost is not None

    def _step(self, event: e.Event, now: float) -> Step:
        decided = super()._step(event, now)
        self._driver.sim.say(
            self._driver.process.name, "%s -> %s", event, [type(one).__name__ for one in decided.commands]
        )
        self._monitor.after(decided, now)
        for record in decided.records:
            fold(self._shadow, record)
        self._checkers.stepped(self._driver, event, decided, self._shadow)
        return decided

    def _do(self, command: c.Command) -> None:
        if isinstance(command, c.StartWorkers):
            self._checkers.starting(self._driver, command)
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


def _request(sim: Simulation) -> TrainRequest:
    rule = sim.scenario.spec.retention
    context = RunContext(
        name="run",
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
        name="run",
        min_workers=1,
        max_workers=1,
        local_mode=False,
        nodes=1,
        max_failures=0,
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

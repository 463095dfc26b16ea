"""The controller's shell: turns messages, timers and signals into events, and commands into I/O.

All decisions are `core.machine`'s. This loop feeds it one event at a time, makes the records durable, shows them to
the observers, and only then carries the commands out. Events that arrive during a flush are taken together, so a
busy run pays one flush for many. It is a guest of the `hub`, which has the event loop and the agents' connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from holdfast.control.agent_link import Preparation
from holdfast.control.blocking_calls import BlockingCalls
from holdfast.control.callbacks import CallbackObserver
from holdfast.control.group_commit import RunJournal
from holdfast.control.hub import Hub
from holdfast.control.lease import GuestLease, Lease
from holdfast.control.persister import Persister
from holdfast.control.publisher import Publisher, ReadBack
from holdfast.control.remover import Remover
from holdfast.control.retry import retry_for
from holdfast.control.run_control import RunControl, RunFacts
from holdfast.control.validation import PrepareValidation, ValidationRunner
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.admission import Gang
from holdfast.core.failure_kind import FailureKind
from holdfast.core.machine import Step, deadline, step
from holdfast.core.records import AgentAdded, GenerationRunning, Record
from holdfast.core.resources import Offer
from holdfast.core.state import State
from holdfast.engines.engine import EngineName, MakeEngine
from holdfast.engines.ray.options import RayOptions
from holdfast.errors import Fenced, StorageError
from holdfast.journal.fold import FoldWriter
from holdfast.runtime import current
from holdfast.storage.store import Store
from holdfast.views.observer import Observer
from holdfast.views.terminal.terminal import Terminal
from holdfast.wire import messages as m
from holdfast.wire.liveness import LoopWatch

__all__ = ["Controller", "ControllerSetup", "RunOwner", "Settings"]

_log = logging.getLogger(__name__)
_STALL_S = 30.0
"""A standstill of this process that is much shorter is not told to the core, unless a timeout is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The shell's own times; the core's are in `RunSpec`."""

    flush_s: float = 0.25
    """How long a record without a command may wait for its flush."""
    minor_flush_s: float = 2.0
    """The same for records by which nothing is decided and nothing is lost: an agent is there, workers run."""
    flush_records: int = 500
    """So many records are flushed at once: until then they are held in memory, for the journal and for the views."""
    storage_patience_s: float = 300.0
    """How long storage may fail before the run does."""
    refuse_conflicts: bool = False
    """Whether a file name that several ranks give to one checkpoint ends the run."""
    beat_s: float = 5.0


@dataclass(slots=True)
class ControllerSetup:
    """What a controller is given to start from."""

    store: Store
    run_id: str
    """What every record of this run carries."""
    state: State
    began: e.ControllerBegan
    preparation: Preparation
    gang: Gang
    fold_writer: FoldWriter | None = None
    """Of a run with a journal of its own."""
    observers: Sequence[Observer] = ()
    settings: Settings = field(default_factory=Settings)
    make_engine: MakeEngine | None = None
    """For a run that needs an engine of its own: local mode."""
    engine: EngineName | RayOptions = EngineName.LOCAL
    """Whose agents the run uses otherwise."""
    known_offers: Callable[[], Sequence[Offer]] | None = None
    """What the run's agents can ever offer; None: others may join."""
    prepare_validation: PrepareValidation | None = None
    """What an agent is sent that validates a checkpoint, where there is a function for that."""
    make_publisher: Callable[[Sequence[Observer], ReadBack], Publisher] = Publisher
    owner: RunOwner | None = None
    """Who decides by the run's reports whether it goes on."""


class RunOwner(Protocol):
    """What a run is a part of: the trial of an experiment."""

    def recorded(self, records: Sequence[Record]) -> None:
        """The run has recorded this, which is in the journal, though not durable yet."""
        ...

    def goes_on(self) -> bool | None:
        """Whether the run goes on after the reports of which the owner knows. False is answered to workers once what
        is in the journal by then is durable. None: that is decided when more is recorded, and they wait."""
        ...

    def pinned(self) -> Sequence[str]:
        """Names of checkpoints of the run that retention must leave alone, besides those that users have pinned."""
        ...


class Controller:
    """Drives one run from `ControllerBegan` to `EndRun`."""

    def __init__(self, plan: ControllerSetup, lease: Lease | GuestLease, journal: RunJournal, hub: Hub) -> None:
        self._plan = plan
        self._state = plan.state
        self._lease = lease
        self._journal = journal
        self._settings = plan.settings
        self._events: deque[tuple[e.Event, float]] = deque()
        """Each with the time at which it arrived: a flush that takes long must not make ranks look silent."""
        self._wake = asyncio.Event()
        self._publisher = plan.make_publisher(plan.observers, journal.read_back)
        for observer in plan.observers:
            if isinstance(observer, CallbackObserver):
                observer.on_error = lambda raised: self.post_threadsafe(e.CallbackFailed(raised=raised))
        self._agents = hub.enter(
            plan.gang,
            plan.preparation,
            self.post,
            self._publisher,
            self._answer,
            plan.make_engine,
            plan.engine,
        )
        for observer in plan.observers:
            if isinstance(observer, Terminal):
                observer.waiting_for = lambda: self._agents.waiting_for
                self._agents.on_waiting = lambda: self._publisher.wake(Terminal)
        self._undecided: list[m.Collected] = []
        """Ranks wait for the decision whether the run goes on; what to answer them."""
        self._is_decision_due = False
        self._agents.on_decision = self._decision_wanted
        self._blocking = BlockingCalls()
        self._persister = Persister(
            plan.store,
            lease,
            self._agents,
            plan.settings.storage_patience_s,
            self._blocking,
            refuse_conflicts=plan.settings.refuse_conflicts,
        )
        self._hub = hub
        self._validation: ValidationRunner | None = None
        if plan.prepare_validation is not None:
            self._validation = ValidationRunner(
                hub, plan.run_id, lease.epoch, plan.prepare_validation, self._publisher, plan.engine, plan.gang.torch
            )
        self._remover = Remover(plan.store, lease.check, self._blocking, plan.owner.pinned if plan.owner else tuple)
        self._tasks: set[asyncio.Task[None]] = set()
        self._status: c.RunStatus | None = None
        self._journal_lost: StorageError | None = None
        self._runtime = current()
        self._started = (self._runtime.now(), self._runtime.monotonic())
        self.control = RunControl(
            RunFacts(
                name=plan.preparation.run.experiment,
                uri=plan.store.uri,
                host=plan.began.host,
                pid=plan.began.pid,
                started_at=self._now(),
            ),
            self._state,
            self._agents,
            self._publisher.recent_logs,
            self.post,
            hub.join_strings[0],
            plan.known_offers,
        )
        """For control clients."""
        self._loop = asyncio.get_running_loop()
        self._stepped_at = 0.0
        self._watch = LoopWatch(plan.state.spec.progress_timeout_s or _STALL_S, self._loop.time())
        self._flush_at = math.inf
        """When the records that the observers have not got must be durable, at the latest."""

    # ------------------------------------------------------------ events in

    def post(self, event: e.Event) -> None:
        """Queue an event; from the loop's own thread."""
        if isinstance(event, e.StopRequested) and self._status is not None:
            self._agents.hurry()  # asked again while agents still store their logs: enough of that
        self._events.append((event, self._now()))
        self._wake.set()

    def stop_by(self, stop: Callable[[e.StopRequested], None]) -> None:
        """Control clients that stop the run do so by calling this."""
        self.control.stop = stop

    def post_threadsafe(self, event: e.Event) -> None:
        """Queue an event from any thread or signal handler; after the end nobody minds."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.post, event)

    def _now(self) -> float:
        """Wall time that never goes backwards while this controller lives."""
        wall, monotonic = self._started
        return wall + self._runtime.monotonic() - monotonic

    # ------------------------------------------------------------ the loop

    async def run(self) -> c.RunStatus:
        """Until the core says `EndRun`; returns its status."""
        self._beating = self._loop.call_later(self._settings.beat_s, lambda: self._spawn(self._keep_lease()))
        self._watching = self._loop.call_later(self._watch.interval_s, self._watch_loop)
        self.post(self._plan.began)
        self._hub.api.enter(self._plan.run_id, self.control)
        try:
            while self._status is None:
                await self._wait()
                await self._turn()
        finally:
            await self._close()
        if self._journal_lost is not None and self._status is c.RunStatus.FINISHED:
            raise self._journal_lost  # nobody would ever learn that it was
        return self._status

    async def _wait(self) -> None:
        """Until there is an event, a deadline of the core, or a flush to be made."""
        if self._events or self._is_decision_due:
            return
        self._wake.clear()
        due = deadline(self._state)
        waits = [max(0.0, self._flush_at - self._loop.time())] if self._flush_at < math.inf else []
        if due is not None:
            waits.append(max(0.0, due - self._now()))
        timer = self._loop.call_later(min(waits), self._wake.set) if waits else None
        await self._wake.wait()
        if timer is not None:
            timer.cancel()
        if due is not None and not self._events and self._now() >= due:
            self._events.append((e.TimePassed(), self._now()))

    def _look_for_stall(self) -> None:
        """After a gap of this process's own, waiting begins anew; that is told before anything that came afterwards."""
        if stalled_s := self._watch.stalled_s(self._loop.time()):
            _log.info("The controller's process stood still for %.1f s.", stalled_s)
            self._events.appendleft((e.ControllerStalled(stalled_s=stalled_s), self._now()))
            self._wake.set()

    def _watch_loop(self) -> None:
        self._look_for_stall()
        self._watching = self._loop.call_later(self._watch.interval_s, self._watch_loop)

    async def _turn(self) -> None:
        """Take in all queued events, make what was decided durable, then do it."""
        commands: list[c.Command] = []
        self._look_for_stall()
        while self._events:
            event, arrived_at = self._events.popleft()
            if isinstance(event, e.AgentLost):
                self._agents.saw_loss(event.agent)
            self._stepped_at = max(self._stepped_at, arrived_at)
            decided = self._step(event, self._stepped_at)
            self._plan_flush(decided.records)
            self._journal.append(decided.records)
            self._publisher.hold(decided.records)
            if self._plan.owner is not None and decided.records:
                self._plan.owner.recorded(decided.records)
            commands.extend(decided.commands)
        stopping = self._answer_decisions()
        ends = [command.status for command in commands if isinstance(command, c.EndRun)]
        if ends and (why := await self._fenced_by()) is not None:
            self._state.fatal = (FailureKind.FENCED, why)
            ends = [c.RunStatus.FENCED]
        if c.RunStatus.FENCED in ends:
            self._publisher.forget()
            self._status = c.RunStatus.FENCED
            return
        due = self._loop.time() >= self._flush_at or self._journal.unsaved_records >= self._settings.flush_records
        # To ask for agents changes nothing that counts: what led to it becomes durable with what comes of it.
        waits = any(not isinstance(command, c.RequestAgents) for command in commands)
        durable = await self._make_durable() if waits or due or stopping else True
        for answer in stopping if durable else ():
            self._agents.answer(answer)
        for command in commands:
            # Without a journal nothing new may begin, but everything may still be brought to its end.
            if durable or isinstance(command, c.StopWorkers | c.EndRun):
                self._do(command)
            elif isinstance(command, c.PersistCheckpoint):
                self.post(e.CheckpointFailed(ticket=command.ticket, error="the journal could not be written"))
        if self._agents.must_give_up:
            self._agents.give_up_revoked(self._state.agents_in_use())

    def _decision_wanted(self, answer: m.Collected) -> None:
        """All ranks wait after a report. Their reports arrived before, and are taken in first."""
        self._undecided.append(answer)
        self._is_decision_due = True
        self._wake.set()

    def _answer_decisions(self) -> list[m.Collected]:
        """Let ranks that wait go on; returns the answers to those that must not, which wait for the journal."""
        self._is_decision_due = False
        if not self._undecided:
            return []
        goes_on = self._plan.owner is None or self._plan.owner.goes_on()
        if goes_on is None:
            return []
        undecided, self._undecided = self._undecided, []
        stopping: list[m.Collected] = []
        for answer in undecided:
            answer = msgspec.structs.replace(answer, data=goes_on)
            if goes_on:
                self._agents.answer(answer)
            else:
                stopping.append(answer)
        return stopping

    def _plan_flush(self, records: Sequence[Record]) -> None:
        """Decide when these records must be durable, should no command ask for it before."""
        for record in records:
            is_minor = isinstance(record, AgentAdded | GenerationRunning)
            due_at = self._loop.time() + (self._settings.minor_flush_s if is_minor else self._settings.flush_s)
            self._flush_at = min(self._flush_at, due_at)

    def _step(self, event: e.Event, now: float) -> Step:
        return step(self._state, event, now)

    async def _fenced_by(self) -> str | None:
        """A sentence on who took the run over, if anybody did: an end that this controller comes to counts no more."""
        try:
            await self._blocking.run(self._lease.check)
        except Fenced as error:
            return str(error)
        except StorageError as error:
            _log.info("The lease could not be looked at: %s", error)
        return None

    async def _make_durable(self) -> bool:
        """Flush the journal, with patience as long as it ever worked; False, and the end of the run, otherwise."""
        patience_s = self._settings.storage_patience_s if self._journal_lost is None else 0.0
        warning = "The journal cannot be written; trying again"
        try:
            while self._journal.dirty:
                await retry_for(patience_s, self._journal.flush, (StorageError,), warning)
        except StorageError as error:
            self._lose_journal(error)
            return False
        self._flush_at = math.inf
        self._publisher.release()
        return True

    def _lose_journal(self, error: StorageError) -> None:
        self._journal_lost = self._journal_lost or error
        self.post(e.StorageLost(error=str(error), kind=FailureKind.of(error)))

    # ------------------------------------------------------------ commands out

    def _do(self, command: c.Command) -> None:
        match command:
            case c.RequestAgents(slots=slots):
                self._agents.request(slots)
            case c.StartWorkers():
                self._agents.start_workers(command)
            case (
                c.StopWorkers()
                | c.HoldReports()
                | c.AnnounceCheckpoint()
                | c.AnnounceSettled()
                | c.AnnouncePreemption()
            ):
                self._agents.send_command(command)
            case c.PersistCheckpoint():
                self._spawn(self._persist(command))
            case c.FindPins():
                self._spawn(self._post_outcome(self._remover.find_pins(command)))
            case c.DeleteCheckpoint():
                self._spawn(self._post_outcome(self._remover.remove(command)))
            case c.RunValidation():
                assert self._validation is not None
                self._spawn(self._post_outcome(self._validation.run(command)))
            case c.ChangeBounds(workers_min=workers_min, workers_max=workers_max):
                self._agents.change_bounds(workers_min, workers_max)
            case c.ReleasePlaces():
                self._agents.release_places(command)
            case c.SetHostAside():
                self._agents.set_aside(command)
            case c.FinishCallbacks(generation=generation):
                self._spawn(self._finish_callbacks(generation))
            case c.EndRun(status=status):
                self._status = status

    async def _persist(self, command: c.PersistCheckpoint) -> None:
        try:
            outcome = await self._persister.persist(command)
        except Exception as error:
            # The core waits for the outcome of whatever it has persisted, even when all else is lost.
            internal = f"internal error: {error!r}"
            self.post(e.CheckpointFailed(ticket=command.ticket, error=internal, kind=FailureKind.RUN, fatal=True))
            raise
        refused = isinstance(outcome, e.CheckpointFailed) and outcome.kind is FailureKind.FENCED
        if refused and (why := await self._fenced_by()) is not None:
            self.post(e.ControllerFenced(why=why))
        else:
            self.post(outcome)

    async def _finish_callbacks(self, generation: int) -> None:
        await self._blocking.run(self._publisher.wait_for, CallbackObserver)
        self.post(e.CallbacksFinished(generation=generation))

    async def _post_outcome(self, work: Coroutine[Any, Any, e.Event]) -> None:
        self.post(await work)

    def _answer(self, kind: m.CollectiveKind, data: Any) -> Any:
        """What ranks get from a collective: rank 0's data, or the core's word on whether a checkpoint is due."""
        if kind is not m.CollectiveKind.CHECKPOINT_INTERVAL:
            return data
        call, generation = int(data), self._state.generation
        if generation is not None and generation.change is not None:
            self._state.checkpoint_interval.asked(call, self._now())
            return True, call + 1, True
        return *self._state.checkpoint_interval.ask(call, self._state.durable.failures, self._now()), False

    # ------------------------------------------------------------ the rest

    async def _keep_lease(self) -> None:
        while True:
            try:
                await self._blocking.run(self._lease.beat)
            except Fenced as error:
                self.post(e.ControllerFenced(why=str(error)))
                return
            except StorageError as error:
                _log.info("The lease could not be renewed this time: %s", error)
            await asyncio.sleep(self._settings.beat_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("A part of the controller failed; the run is stopped.", exc_info=error)
            self.post(e.StorageLost(error=f"internal error: {error!r}", kind=FailureKind.RUN))

    async def _close(self) -> None:
        """Everything down, in the order that loses nothing."""
        await self._agents.close(0.0 if self._state.forced else 30.0)
        for timer in (self._beating, self._watching):
            timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._blocking.finished()
        self._hub.api.leave(self._plan.run_id)
        if self._publisher.has_observers:
            await self._blocking.run(self._publisher.close)

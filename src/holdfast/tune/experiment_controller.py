"""Runs an experiment: carries out what `machine` decides, with one `Controller` for each trial that runs.

Trials are guests of the hub, as runs are, and of the experiment's lease: their records stand in the experiment's
journal. Each record is shown to the machine as soon as it is appended, so that the journal's order is the order in
which searcher and scheduler learned of things; workers that wait for a decision get it once it is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from holdfast.control.blocking_calls import BlockingCalls, call_in_daemon_thread
from holdfast.control.group_commit import GroupCommit, RunJournal
from holdfast.control.hub import Hub
from holdfast.control.lease import GuestLease, Lease
from holdfast.control.loop import Controller, ControllerSetup, RunOwner
from holdfast.control.publisher import Publisher
from holdfast.control.retry import retry_for
from holdfast.control.run_control import RunControl
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.commands import RunStatus
from holdfast.core.failure_kind import FailureKind
from holdfast.errors import ConfigError, Fenced, HoldfastError, StorageError, TuneError
from holdfast.journal.format import Line
from holdfast.journal.reader import JournalReader, Mark
from holdfast.runtime import current
from holdfast.storage.store import Store
from holdfast.tune.experiment_control import ExperimentControl, ExperimentFacts
from holdfast.tune.experiment_observer import ExperimentObserver
from holdfast.tune.machine import AskSearcher, ExperimentMachine, TrialState
from holdfast.tune.objective import require_metric
from holdfast.tune.trial_files import TrialFiles
from holdfast.tune.user_code import describe_error

__all__ = ["ExperimentController", "ExperimentSetup", "MakeTrial"]

_BEAT_S = 5.0
_ASK_STOPPER_S = 1.0
_MAX_CLOSING = 16
"""With so many trials that end, none is started: storage that is slow must not pile them up."""
_SEARCHER_PATIENCE_S = 2.0
"""How long a searcher may think when everything else has ended: what it says has no effect any more."""
_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")

MakeTrial = Callable[[TrialState, GuestLease, RunOwner], ControllerSetup]
"""From a trial to what its controller starts from; called in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSetup:
    """What an experiment's controller is given to start from."""

    store: Store
    machine: ExperimentMachine
    """With all records read back."""
    begin: Sequence[r.Record]
    """What is recorded first."""
    make_trial: MakeTrial
    facts: ExperimentFacts
    observers: Sequence[ExperimentObserver | TrialFiles]
    """Whom to show each record once it is durable."""
    storage_patience_s: float = 300.0
    metric: str | None = None
    """Which each trial's first report must have."""


class ExperimentController:
    """A guest of the hub. Used from the hub's event loop, but for `post_threadsafe`."""

    def __init__(self, setup: ExperimentSetup, lease: Lease, commit: GroupCommit, hub: Hub) -> None:
        self.fenced_by = ""
        """A sentence on who took the experiment over, if anybody did."""
        self._setup = setup
        self._machine = setup.machine
        self._lease = lease
        self._commit = commit
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._blocking = BlockingCalls()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._closing: set[str] = set()
        """Those of `_running` whose end is recorded, and who still write logs and result files. The next trial is
        prepared meanwhile; its workers wait for room, as every run's do."""
        self._controllers: dict[str, Controller] = {}
        self._asking: asyncio.Task[None] | None = None
        """Waits for the searcher."""
        self._is_searcher_left = False
        """It did not answer, and perhaps never will: it must not be called again."""
        self._stop: e.StopRequested | None = None
        self._error: BaseException | None = None
        self._unsaved: deque[Line] = deque()
        """What observers are not to see before it is durable."""
        self._control = ExperimentControl(
            setup.facts, setup.machine, self._trial_controls, self._stop_requested, hub.join_strings[0]
        )
        # It passes on whatever it is given: lines, since the journal has records of many runs.
        self._publisher = Publisher(cast("Any", setup.observers), cast("Any", self._read_back))
        commit.on_saved = self._publish

    @property
    def interrupted_by(self) -> str:
        """ "Ctrl+C", or the name of a signal; "" if nothing stopped it."""
        return self._stop.why if self._stop is not None else ""

    # ------------------------------------------------------------ from outside

    def post_threadsafe(self, event: e.StopRequested) -> None:
        """From any thread or signal handler; after the end nobody minds."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop_requested, event)

    def stop_by(self, stop: Callable[[e.StopRequested], None]) -> None:
        """Control clients that stop the experiment do so by calling this."""
        self._control.stop = stop

    def _stop_trial(self, trial: TrialState, event: e.StopRequested) -> None:
        """A control client stops a trial, which does not go on then."""
        self._machine.stop_trial(trial)
        self._record_decided("")
        if event.force:
            self._controllers[trial.trial_id].post(event)

    def _trial_controls(self) -> dict[str, RunControl]:
        return {trial_id: controller.control for trial_id, controller in self._controllers.items()}

    def _stop_requested(self, event: e.StopRequested) -> None:
        is_first, self._stop = self._stop is None, event
        for trial_id, controller in self._controllers.items():
            if not (is_first and trial_id in self._closing):  # which end anyway
                controller.post(event)
        self._wake.set()

    # ------------------------------------------------------------ the loop

    async def run(self) -> RunStatus:
        """Until no trial runs and none is to be started."""
        side = [self._loop.create_task(self._keep_lease())]
        if (left_s := self._machine.time_left_s) is not None:
            side.append(self._loop.create_task(self._end_budget(left_s)))
        side.append(self._loop.create_task(self._ask_stopper()))
        self._hub.api.enter(self._machine.id, self._control)
        try:
            self._record(self._setup.begin)
            self._guard(self._machine.stop_at_limit)
            self._record_decided("")
            self._machine.resume()
            while True:
                self._start_trials()
                if not self._running and self._asking is None:
                    if self.is_failed or self._is_searcher_left or not self._machine.has_untold:
                        break
                    self._asking = self._loop.create_task(self._use_searcher(self._machine.tell_searcher))
                self._wake.clear()
                try:
                    async with asyncio.timeout(self._patience_s):
                        await self._wake.wait()
                except TimeoutError:
                    self._leave_searcher()
            return await self._end()
        finally:
            self._hub.api.leave(self._machine.id)
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
            self._publish()
            await self._blocking.run(self._publisher.close)
            await self._blocking.finished()

    @property
    def is_failed(self) -> bool:
        """Nothing is decided any more: what runs is being stopped."""
        return self._error is not None or bool(self.fenced_by)

    @property
    def _patience_s(self) -> float | None:
        """How long to wait for the searcher, if the experiment ends and everything else has."""
        if self._running or not (self.is_failed or self._stop is not None or self._machine.stop_why):
            return None
        return 0.0 if self._stop is not None and self._stop.force else _SEARCHER_PATIENCE_S

    def _leave_searcher(self) -> None:
        if self._asking is not None:
            _log.info("The searcher does not answer: the experiment ends without it.")
            self._asking.cancel()
            self._asking, self._is_searcher_left = None, True

    async def _end(self) -> RunStatus:
        if self._error is not None:
            raise self._error
        if self.fenced_by:
            return RunStatus.FENCED
        why = self._stop.why if self._stop is not None else self._machine.stop_why
        self._record([r.ExperimentEnded(at=current().now(), why=why)])
        warning = "The experiment's journal cannot be written; trying again"
        await retry_for(self._setup.storage_patience_s, self._commit.flush, (StorageError,), warning)
        return RunStatus.INTERRUPTED if self._stop is not None else RunStatus.FINISHED

    def _start_trials(self) -> None:
        while self._stop is None and not self.is_failed:
            if len(self._closing) > _MAX_CLOSING:
                return
            running = len(self._running) - len(self._closing)
            found = self._guard(self._machine.next_trial, running, current().now())
            if found is None:
                return
            if isinstance(found, TrialState):
                if found.trial_id in self._running:
                    return  # what is left of its run ends in a moment
                found.status = TrialState.RUNNING
                self._running[found.trial_id] = self._loop.create_task(self._run_trial(found))
            elif isinstance(found, AskSearcher):
                self._asking = self._loop.create_task(self._use_searcher(self._machine.ask, found))
                return
            else:
                self._record([found])
                self._record_decided("")

    async def _use_searcher(self, call: Callable[..., Any], *asked: AskSearcher) -> None:
        """Ask the searcher, or tell it the rest. It is the user's code, and may take for ever."""
        try:
            suggestion = await call_in_daemon_thread("The searcher", call, *asked)
            for ask in asked:
                self._take_suggestion(ask, suggestion)
        except Exception as error:  # noqa: BLE001  whatever it is, the trials are ended in order
            self._give_up(error)
        finally:
            self._asking = None
            self._wake.set()

    def _take_suggestion(self, ask: AskSearcher, suggestion: dict[str, Any] | str | None) -> None:
        if self._stop is None and not self.is_failed:
            created = self._guard(self._machine.answer, ask, suggestion, current().now())
            if created is not None:
                self._record([created])
                self._record_decided("")

    async def _run_trial(self, trial: TrialState) -> None:
        try:
            await self._drive_trial(trial)
        except HoldfastError as error:
            if isinstance(error, StorageError | Fenced):
                self._give_up(error)
            else:
                self._fail_trial(trial, error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  whatever it is, the other trials are ended in order
            _log.exception("A part of the experiment failed; it is stopped.")
            self._give_up(error)
        finally:
            del self._running[trial.trial_id]
            self._closing.discard(trial.trial_id)
            self._controllers.pop(trial.trial_id, None)
            self._wake.set()

    async def _drive_trial(self, trial: TrialState) -> None:
        lease = self._lease.guest(self._setup.store.sub(trial.directory), is_new=not trial.is_started)
        setup = await self._blocking.run(self._setup.make_trial, trial, lease, _TrialOwner(self, trial))
        if self.is_failed:
            return
        if trial.stopped is not None and not trial.stopped.paused:
            self._machine.withdraw(trial)
            return
        controller = Controller(setup, lease, RunJournal(self._commit, trial.trial_id), self._hub)
        self._controllers[trial.trial_id] = controller
        controller.stop_by(partial(self._stop_trial, trial))
        if self._stop is not None:
            controller.post(self._stop)
        status = await controller.run()
        if status is RunStatus.FENCED:
            self._fenced(f"{self._setup.store.uri} was taken over by another controller.")

    def _fail_trial(self, trial: TrialState, error: HoldfastError) -> None:
        """The trial could not even be started."""
        failed = r.RunFailed(at=current().now(), error=str(error), error_type=FailureKind.of(error))
        self._commit.journal.append([failed], trial.trial_id)
        self._show(trial.trial_id, [failed])
        self._guard(self._machine.apply, trial.trial_id, failed)
        self._record_decided(trial.trial_id)

    def give_up_threadsafe(self, error: BaseException) -> None:
        """Let every trial be stopped, and raise this: a callback failed. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._give_up, error)

    def _guard(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """What the machine answers. What it calls is the user's code: whatever that raises ends this experiment, in
        order, and never the event loop."""
        try:
            return call(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  an exit, too, is none for the other runs of this process
            cause = error.__cause__ if isinstance(error, HoldfastError) else error
            if cause is not None and self._error is None:
                _log.error("A part of the experiment failed; it is stopped.", exc_info=cause)
            self._give_up(error)
            return None

    def _give_up(self, error: BaseException) -> None:
        if self._error is not None:
            return  # what was asked to stop is not to hurry for it
        if not isinstance(error, Exception) or isinstance(error, StopIteration):  # which no task can raise
            error = TuneError(f"The experiment was stopped, since {describe_error(error)} was raised in it.")
        self._error = error
        for trial_id, controller in self._controllers.items():
            if trial_id not in self._closing:  # which end anyway
                controller.post(e.StopRequested(why="the experiment failed"))
        self._wake.set()

    # ------------------------------------------------------------ records

    def trial_recorded(self, trial: TrialState, records: Sequence[r.Record]) -> None:
        """A trial's controller has appended these."""
        self._show(trial.trial_id, records)
        for record in records:
            self._guard(self._machine.apply, trial.trial_id, record)
            if isinstance(record, r.Reported) and record.iteration == 1:
                self._check_metric(trial, record)
        # Before its workers start, nobody waits for an answer.
        is_starting = any(isinstance(record, r.ControllerStarted) for record in records)
        if any(isinstance(record, r.RunFinished | r.RunFailed | r.RunInterrupted) for record in records):
            self._closing.add(trial.trial_id)
        self._record_decided("" if is_starting else trial.trial_id)
        if not all(isinstance(record, r.AgentAdded | r.GenerationStarted | r.GenerationRunning) for record in records):
            self._wake.set()  # perhaps another trial can be started

    def _check_metric(self, trial: TrialState, first: r.Reported) -> None:
        """A metric that nobody reports is found out at once, not when the best trial is asked for."""
        if self._setup.metric is not None:
            try:
                require_metric(self._setup.metric, first.metrics, trial.trial_id)
            except ConfigError as error:
                self._give_up(error)

    def _record(self, records: Sequence[r.Record]) -> None:
        """Append records of the experiment itself, which becomes durable with what is done because of them."""
        self._commit.journal.append(records, self._machine.id)
        self._show(self._machine.id, records)
        for record in records:
            self._guard(self._machine.apply, self._machine.id, record)

    def _record_decided(self, reporting: str) -> None:
        """Record what the machine decided. A trial that has just reported learns of it as the answer to its report;
        others are stopped where they are."""
        while decided := self._machine.decided:
            ends_already = {trial_id for trial_id in self._controllers if self._machine.trials[trial_id].stopped}
            self._record(decided)
            for record in decided:
                if isinstance(record, r.TrialReset) or record.trial in {reporting, *ends_already}:
                    continue
                if (controller := self._controllers.get(record.trial)) is not None:
                    by = record.by if isinstance(record, r.TrialStopped) else "scheduler"
                    controller.post(e.StopRequested(why=f"stopped by the {by}"))

    def _show(self, run: str, records: Sequence[r.Record]) -> None:
        """These were appended just now: observers get them once they are durable."""
        first = self._commit.journal.appended - len(records) + 1
        self._unsaved += [Line(n, run, 0, record) for n, record in enumerate(records, first)]

    def _publish(self) -> None:
        durable: list[Any] = []
        while self._unsaved and self._unsaved[0].n <= self._commit.journal.saved:
            durable.append(self._unsaved.popleft())
        self._publisher.hold(durable)
        self._publisher.release()

    def _read_back(self, after: int) -> Iterator[tuple[int, Line]]:
        journal = self._commit.journal
        for _, line in JournalReader(journal.store).read(Mark(journal.epoch, journal.lease, after)):
            yield line.n, line

    # ------------------------------------------------------------ beside the loop

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            try:
                await self._blocking.run(self._lease.beat)
            except Fenced as error:
                self._fenced(str(error))
                return
            except StorageError as error:
                _log.info("The lease could not be renewed this time: %s", error)

    def _fenced(self, why: str) -> None:
        self.fenced_by = self.fenced_by or why
        for controller in self._controllers.values():
            controller.post(e.ControllerFenced(why=why))
        self._wake.set()

    async def _ask_stopper(self) -> None:
        """Trials that report nothing end with the experiment's time as well."""
        while not self._machine.stop_why and not self.is_failed:
            await asyncio.sleep(_ASK_STOPPER_S)
            self._guard(self._machine.ask_stopper)
            if self._machine.stop_why:
                self._record_decided("")
                self._wake.set()

    async def _end_budget(self, left_s: float) -> None:
        await asyncio.sleep(left_s)
        self._machine.use_up_budget()
        self._record_decided("")
        self._wake.set()


class _TrialOwner:
    """One trial's `RunOwner`."""

    def __init__(self, controller: ExperimentController, trial: TrialState) -> None:
        self._controller = controller
        self._trial = trial

    def recorded(self, records: Sequence[r.Record]) -> None:
        self._controller.trial_recorded(self._trial, records)

    def goes_on(self) -> bool | None:
        if self._trial.stopped is not None:
            return False
        if self._controller.is_failed:
            return None  # perhaps this report could not be decided on; its workers are being stopped
        return True if self._trial.undecided is None else None

    def pinned(self) -> Sequence[str]:
        return self._trial.pins

"""`run_training`: from a request to an outcome. What `fit()` does, seen from the driver's main thread.

The controller lives in a thread of its own, so that it works wherever `fit()` is called, notebooks included; what the
calling thread does meanwhile is in `driver_thread`. `setup` puts together what the controller needs.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from functools import partial
from typing import Any

from holdfast.control.driver_thread import DriverThread
from holdfast.control.failures import run_error
from holdfast.control.history import read_history
from holdfast.control.lease import Lease, acquire
from holdfast.control.loop import Controller, ControllerSetup
from holdfast.control.request import TrainOutcome, TrainRequest
from holdfast.control.setup import (
    changes_of,
    check_resume,
    engine_maker,
    make_observers,
    make_prepare,
    make_setup,
)
from holdfast.core import records as r
from holdfast.core.commands import RunStatus
from holdfast.core.events import StopRequested
from holdfast.errors import Fenced
from holdfast.journal.writer import Journal
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store
from holdfast.views.terminal.terminal import print_complete

__all__ = ["run_training"]


def run_training(request: TrainRequest) -> TrainOutcome:
    """Run or continue a training run to its end; raises only what kept it from starting, or a lost lease."""
    store = open_store(request.storage_path, request.filesystem).sub(request.name)
    history = read_history(store)
    check_resume(request, store, history)
    is_same = request.resume != "restart" and not changes_of(request, history)
    if isinstance(history.durable.outcome, r.RunFinished) and is_same:
        if request.verbose > 0:
            print_complete(sys.stderr, request.name, store.uri, history.durable.iteration)
        return _outcome(store, history.durable.outcome)
    prepare = make_prepare(request)
    lease = acquire(store, takeover=request.takeover)
    driver_thread = DriverThread()
    try:
        make_engine = engine_maker(request, driver_thread.put)
        views = partial(make_observers, request)
        plan = make_setup(request, prepare, store, read_history(store), lease, make_engine, views)
        status = _drive(plan, lease, driver_thread)
    finally:
        lease.release()
        driver_thread.close()
    if status is RunStatus.FENCED:
        assert plan.state.fatal is not None
        raise Fenced(plan.state.fatal[1])
    return _outcome(store, plan.state.durable.outcome)


def _drive(plan: ControllerSetup, lease: Lease, driver_thread: DriverThread) -> RunStatus:
    """Run the controller in its thread, and this one beside it."""
    journal = Journal(plan.store, lease.epoch, lease.id, plan.run_id)
    journal.on_loss = plan.fold_writer.ask
    outcome: list[RunStatus | BaseException] = []
    controllers: list[Controller] = []
    ready = threading.Event()

    async def main() -> RunStatus:
        controllers.append(Controller(plan, lease, journal))
        ready.set()
        return await controllers[0].run()

    def work() -> None:
        try:
            outcome.append(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001  handed over to the thread that waits
            outcome.append(error)
        finally:
            ready.set()
            driver_thread.put(None)

    with driver_thread.signals():
        thread = threading.Thread(target=work, name="holdfast-controller")
        thread.start()
        ready.wait()
        for controller in controllers:
            driver_thread.connect(controller.post_threadsafe)
        try:
            driver_thread.serve()
        except BaseException as error:  # nobody may leave this thread while the other one works
            for controller in controllers:
                controller.post_threadsafe(StopRequested(why=type(error).__name__, force=True))
            raise
        finally:
            thread.join()
    journal.close()
    plan.fold_writer.flush()  # if the journal turned out to be gone only now
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _outcome(store: Store, ended: Any) -> TrainOutcome:
    if isinstance(ended, r.RunFinished):
        return TrainOutcome(status=RunStatus.FINISHED, uri=store.uri, store=store, return_value=ended.return_value)
    if isinstance(ended, r.RunInterrupted):
        return TrainOutcome(status=RunStatus.INTERRUPTED, uri=store.uri, store=store, interrupted_by=ended.why)
    assert isinstance(ended, r.RunFailed), ended
    return TrainOutcome(status=RunStatus.FAILED, uri=store.uri, store=store, error=run_error(ended, store.uri))

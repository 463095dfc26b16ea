"""`run_training`: from a request to an outcome. What `fit()` does, seen from the driver's main thread.

The controller lives in a thread of its own, so that it works wherever `fit()` is called, notebooks included; this
thread waits, and turns the first Ctrl+C or SIGTERM into a clean stop and further ones into a quick one.
`begin` puts together what the controller needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from holdfast.control.begin import check_resume, make_plan, make_prepare
from holdfast.control.failures import run_error
from holdfast.control.history import read_history
from holdfast.control.journal import Journal
from holdfast.control.lease import Lease, acquire
from holdfast.control.loop import Controller, Plan
from holdfast.control.request import TrainOutcome, TrainRequest
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.errors import Fenced
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store

__all__ = ["Calls", "run_training"]

_log = logging.getLogger("holdfast")

Calls = queue.SimpleQueue[Callable[[], None] | None]
"""Work for the thread that called `fit()`; None when the run is over."""


def run_training(request: TrainRequest) -> TrainOutcome:
    """Run or continue a training run to its end; raises only what kept it from starting, or a lost lease."""
    store = open_store(request.storage_path, request.filesystem).sub(request.name)
    history = read_history(store)
    check_resume(request, store, history)
    if isinstance(history.durable.outcome, r.RunFinished):
        _log.info("%s is complete already.", store.uri)
        return _outcome(store, history.durable.outcome)
    prepare = make_prepare(request)
    calls: Calls = queue.SimpleQueue()
    lease = acquire(store, takeover=request.takeover)
    try:
        plan = make_plan(request, prepare, store, read_history(store), lease, calls.put)
    except BaseException:
        lease.release()
        raise
    try:
        status = _drive(plan, lease, calls, inline=request.local_mode)
    finally:
        lease.release()
    if status == "fenced":
        assert plan.state.fatal is not None
        raise Fenced(plan.state.fatal[1])
    return _outcome(store, plan.state.durable.outcome)


def _drive(plan: Plan, lease: Lease, calls: Calls, *, inline: bool) -> str:
    """Run the controller in its thread. This one waits, answers signals, and in local mode runs the function."""
    journal = Journal(plan.store, lease.epoch)
    outcome: list[str | BaseException] = []
    controllers: list[Controller] = []
    ready = threading.Event()

    async def main() -> str:
        controller = Controller(plan, lease, journal)
        controllers.append(controller)
        ready.set()
        return await controller.run()

    def work() -> None:
        try:
            outcome.append(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001  handed over to the thread that waits
            outcome.append(error)
        finally:
            ready.set()
            calls.put(None)

    thread = threading.Thread(target=work, name="holdfast-controller")
    thread.start()
    ready.wait()
    with _signals_to(controllers, inline=inline):
        while (call := calls.get()) is not None:
            call()
        thread.join()
    journal.close()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@contextlib.contextmanager
def _signals_to(controllers: list[Controller], *, inline: bool) -> Iterator[None]:
    """Ctrl+C and SIGTERM stop the run; only the main thread may say so to Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        why = "Ctrl+C" if number == signal.SIGINT else signal.Signals(number).name
        for controller in controllers:
            controller.post_threadsafe(e.StopRequested(why=why, force=asked > 1))
        if inline and asked == 1:
            raise KeyboardInterrupt  # the training function runs in this very thread

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(store: Store, ended: Any) -> TrainOutcome:
    if isinstance(ended, r.RunFinished):
        return TrainOutcome(status="finished", uri=store.uri, store=store, return_value=ended.return_value)
    if isinstance(ended, r.RunInterrupted):
        return TrainOutcome(status="interrupted", uri=store.uri, store=store)
    assert isinstance(ended, r.RunFailed), ended
    return TrainOutcome(status="failed", uri=store.uri, store=store, error=run_error(ended, store.uri))

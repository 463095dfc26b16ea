"""`run_training`: from a request to an outcome. What `fit()` does, seen from the driver's main thread.

The controller is a guest of the process's hub, which lives in a thread of its own (`hub_thread`); what the calling
thread does meanwhile is in `driver_thread`. `setup` puts together what the controller needs.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from holdfast.control.driver_thread import DriverThread
from holdfast.control.failures import run_error
from holdfast.control.group_commit import GroupCommit, RunJournal
from holdfast.control.history import RUN_FILE, read_history
from holdfast.control.hub_thread import join_hub
from holdfast.control.lease import Lease, acquire
from holdfast.control.loop import Controller, ControllerSetup
from holdfast.control.request import TrainOutcome, TrainRequest
from holdfast.control.setup import (
    changes_of,
    check_resources,
    check_resume,
    engine_of_run,
    make_observers,
    make_preparation,
    make_setup,
    write_run_file,
)
from holdfast.core import records as r
from holdfast.core.commands import RunStatus
from holdfast.errors import Fenced
from holdfast.journal.writer import Journal
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store
from holdfast.views.terminal.terminal import print_complete

__all__ = ["run_training"]


def run_training(request: TrainRequest) -> TrainOutcome:
    """Run or continue a training run to its end; raises only what kept it from starting, or a lost lease."""
    check_resources(request)
    store = open_store(request.storage_path, request.filesystem).sub(request.name)
    history = read_history(store)
    check_resume(request, store, history)
    is_same = request.resume != "restart" and not changes_of(request, history)
    if isinstance(history.durable.outcome, r.RunFinished) and is_same:
        if request.verbose > 0:
            print_complete(sys.stdout, sys.stderr, request.name, store.uri, history.durable.iteration)
        return _outcome(store, history.durable.outcome)
    preparation = make_preparation(request)
    write_run_file(request, store)
    lease = acquire(store, takeover=request.takeover, with_keys=[RUN_FILE])
    driver_thread = DriverThread()
    try:
        make_engine = engine_of_run(request, driver_thread.put)
        views = partial(make_observers, request)
        plan = make_setup(request, preparation, store, read_history(store), lease, views, make_engine)
        status = _drive(plan, lease, driver_thread, request.listen)
    finally:
        lease.release()
        driver_thread.close()
    if status is RunStatus.FENCED:
        assert plan.state.fatal is not None
        raise Fenced(plan.state.fatal[1])
    return _outcome(store, plan.state.durable.outcome)


def _drive(plan: ControllerSetup, lease: Lease, driver_thread: DriverThread, listen: str | None) -> RunStatus:
    """Run the controller in the hub's thread, and this one beside it."""
    journal = Journal(plan.store, lease.epoch, lease.id)
    journal.on_loss = plan.fold_writer.ask
    commit = GroupCommit(journal)
    with join_hub() as hub:
        make_controller = partial(Controller, plan, lease, RunJournal(commit, plan.run_id))
        status = hub.run(make_controller, driver_thread, listen)
    commit.close()
    plan.fold_writer.flush()  # if the journal turned out to be gone only now
    return status


def _outcome(store: Store, ended: Any) -> TrainOutcome:
    if isinstance(ended, r.RunFinished):
        return TrainOutcome(status=RunStatus.FINISHED, uri=store.uri, store=store, return_value=ended.return_value)
    if isinstance(ended, r.RunInterrupted):
        return TrainOutcome(status=RunStatus.INTERRUPTED, uri=store.uri, store=store, interrupted_by=ended.why)
    assert isinstance(ended, r.RunFailed), ended
    return TrainOutcome(status=RunStatus.FAILED, uri=store.uri, store=store, error=run_error(ended, store.uri))

"""`run_training`: from a request to an outcome. What `fit()` does, seen from the driver's main thread.

The controller is a guest of the process's hub, which lives in a thread of its own (`hub_thread`); what the calling
thread does meanwhile is in `driver_thread`. `setup` puts together what the controller needs.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

from holdfast.control.driver_thread import DriverThread
from holdfast.control.failures import run_error
from holdfast.control.group_commit import GroupCommit, RunJournal
from holdfast.control.history import RUN_FILE, read_history
from holdfast.control.hub_thread import join_hub
from holdfast.control.lease import acquire
from holdfast.control.loop import Controller
from holdfast.control.request import TrainOutcome, TrainRequest
from holdfast.control.setup import (
    changes_of,
    check_resources,
    check_resume,
    engine_of_run,
    listen_address,
    make_observers,
    make_preparation,
    make_setup,
    write_run_file,
)
from holdfast.core import records as r
from holdfast.core.commands import RunStatus
from holdfast.engines.driver_fork import ForkedAgent, forked_agent
from holdfast.engines.engine import EngineName
from holdfast.errors import Fenced
from holdfast.journal.writer import Journal
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store
from holdfast.views.terminal.terminal import print_complete
from holdfast.wire.join_string import parse_join_string
from holdfast.worker.session import TrainingStopped

__all__ = ["run_training"]


def run_training(request: TrainRequest) -> TrainOutcome:
    """Run or continue a training run to its end; raises only what kept it from starting, or a lost lease."""
    check_resources(request)
    if request.local_mode or request.engine is not EngineName.LOCAL:
        return _run(request)
    with forked_agent(request.environment, request.preload) as agent:  # before any thread of ours starts
        return _run(request, agent)


def _run(request: TrainRequest, agent: ForkedAgent | None = None) -> TrainOutcome:
    store = open_store(request.storage_path, request.filesystem).sub(request.name)
    history = read_history(store)
    check_resume(request, store, history)
    is_same = request.resume != "restart" and not changes_of(request, history)
    if isinstance(history.durable.outcome, r.RunFinished) and is_same:
        if request.verbose > 0:
            print_complete(sys.stdout, sys.stderr, request.name, store.uri, history.durable.iteration)
        for callback in request.callbacks:
            callback._run_stands_at(request.run_context, history.durable.iteration)
        return _outcome(store, history.durable.outcome)
    preparation = make_preparation(request)
    write_run_file(request, store)
    with ExitStack() as before_release:
        # The hub comes first: the lease says at which address control clients find it.
        hub = before_release.enter_context(join_hub(agent))
        join_string = hub.listen(listen_address(request), request.engine, store.local_root)
        lease = acquire(store, takeover=request.takeover, with_keys=[RUN_FILE], address=parse_join_string(join_string))
        driver_thread = DriverThread()
        try:
            if request.on_listening is not None:
                request.on_listening(join_string)
            make_engine = engine_of_run(request, driver_thread.put)
            views = partial(make_observers, request, partial(_leave, driver_thread))
            plan = make_setup(request, preparation, store, read_history(store), lease, views, make_engine)
            journal = Journal(store, lease.epoch, lease.id)
            assert plan.fold_writer is not None
            journal.on_loss = plan.fold_writer.ask
            commit = GroupCommit(journal)
            try:
                status = hub.run(partial(Controller, plan, lease, RunJournal(commit, plan.run_id)), driver_thread)
            finally:
                before_release.close()  # with the last run the agents end
                commit.close()
            plan.fold_writer.flush()  # if the journal turned out to be gone only now
        finally:
            before_release.close()
            lease.release()
            driver_thread.close()
    if status is RunStatus.FENCED:
        assert plan.state.fatal is not None
        raise Fenced(plan.state.fatal[1])
    return _outcome(store, plan.state.durable.outcome)


def _leave(driver_thread: DriverThread, error: BaseException) -> None:
    why = "the trial does not go on" if isinstance(error, TrainingStopped) else type(error).__name__
    driver_thread.leave(error, why)


def _outcome(store: Store, ended: Any) -> TrainOutcome:
    if isinstance(ended, r.RunFinished):
        return TrainOutcome(status=RunStatus.FINISHED, uri=store.uri, store=store, return_value=ended.return_value)
    if isinstance(ended, r.RunInterrupted):
        return TrainOutcome(status=RunStatus.INTERRUPTED, uri=store.uri, store=store, interrupted_by=ended.why)
    assert isinstance(ended, r.RunFailed), ended
    return TrainOutcome(status=RunStatus.FAILED, uri=store.uri, store=store, error=run_error(ended, store.uri))

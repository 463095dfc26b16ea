"""`run_training`: from a request to an outcome. What `fit()` does, seen from the driver's main thread.

The controller lives in a thread of its own, so that it works wherever `fit()` is called, notebooks included; this
thread waits, and turns the first Ctrl+C or SIGTERM into a clean stop and further ones into a quick one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import cloudpickle
import msgspec

from holdfast import __version__
from holdfast.checkpoint import expire, restore
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reservation import now_text, place
from holdfast.checkpoint.writer import this_process
from holdfast.control.callbacks import CallbackObserver, failure_error
from holdfast.control.history import RUN_FILE, History, read_history
from holdfast.control.journal import Journal
from holdfast.control.lease import Lease, acquire
from holdfast.control.loop import Controller, Plan, Settings
from holdfast.control.observer import Observer
from holdfast.control.outputs.files import ResultFiles
from holdfast.control.request import TrainOutcome, TrainRequest
from holdfast.control.terminal.terminal import Terminal
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.retention import RetentionRule
from holdfast.core.spec import RunSpec
from holdfast.core.state import State
from holdfast.engines.engine import Engine, Meeting, OnGone
from holdfast.engines.local import LocalEngine
from holdfast.errors import ConfigError, Fenced, HoldfastError, TrainingFailedError
from holdfast.storage.locate import join, local_cache_dir, open_store
from holdfast.storage.store import Store
from holdfast.wire.messages import Prepare

__all__ = ["run_training"]

_log = logging.getLogger("holdfast")


def run_training(request: TrainRequest) -> TrainOutcome:
    """Run or continue a training run to its end; raises only what kept it from starting, or a lost lease."""
    store = open_store(request.storage_path, request.filesystem).sub(request.name)
    history = read_history(store)
    _check_resume(request, store, history)
    if isinstance(history.durable.outcome, r.RunFinished):
        _log.info("%s is complete already.", store.uri)
        return _outcome(store, history.durable.outcome, "finished")
    lease = acquire(store, takeover=request.takeover)
    _write_run_file(request, store)
    _warn_of_changes(request, store, history)
    state = State(_spec(request), history.durable)
    plan = Plan(
        store=store,
        state=state,
        began=_begin(request, store, lease),
        prepare=_prepare(request),
        make_engine=_engine_maker(request),
        observers=_observers(request, store, history),
        settings=_settings(),
        max_restarts=request.max_failures,
    )
    status = _drive(plan, lease)
    if status == "fenced":
        assert state.fatal is not None
        raise Fenced(state.fatal[1])
    lease.release()
    return _outcome(store, state.durable.outcome, status)


# ---------------------------------------------------------------- before


def _check_resume(request: TrainRequest, store: Store, history: History) -> None:
    if request.resume == "never" and history.exists:
        raise ConfigError(
            f'RunConfig(resume="never"): {store.uri} holds a run already; choose another name, or resume="auto".'
        )
    if request.resume == "must" and not history.exists and Catalog(store).newest() is None:
        raise ConfigError(
            f'RunConfig(resume="must"): there is no run at {store.uri}; check storage_path and name, or use resume="auto".'
        )


def _write_run_file(request: TrainRequest, store: Store) -> None:
    identity = {
        "format": "holdfast.run/1.0",
        "name": request.name,
        "trainer": request.trainer_name,
        "created_at": now_text(),
        "holdfast": __version__,
        "python": platform.python_version(),
    }
    place(store, RUN_FILE, msgspec.json.encode(identity))


def _warn_of_changes(request: TrainRequest, store: Store, history: History) -> None:
    """A name that is used again with something else in it is more often a mistake than not."""
    before = history.durable.fingerprint
    if not before:
        return
    changes = list(_differences(before, dict(request.fingerprint), ""))
    if changes:
        _log.warning(
            "%s continues, but not as it was started: %s. If this is another run, give it another name.",
            store.uri,
            "; ".join(changes[:8]),
        )


def _differences(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted(before.keys() | after.keys()):
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif before != after:
        yield f"{path} was {before!r} and is {after!r}"


def _spec(request: TrainRequest) -> RunSpec:
    return RunSpec(
        workers_min=request.min_workers,
        workers_max=request.max_workers,
        max_failures=request.max_failures,
        progress_timeout_s=request.progress_timeout_s,
        backoff_base_s=float(os.environ.get("HOLDFAST_BACKOFF_S", "1")),
        retention=RetentionRule(request.num_to_keep, request.score_attribute, request.score_order),
    )


def _settings() -> Settings:
    return Settings(storage_patience_s=float(os.environ.get("HOLDFAST_STORAGE_PATIENCE_S", "300")))


def _begin(request: TrainRequest, store: Store, lease: Lease) -> e.ControllerBegan:
    """Look at what storage really holds: shut what earlier controllers left open, and check the newest commit."""
    catalog = Catalog(store)
    catalog.seal(lease.epoch, lease.floor)
    damaged: dict[str, str] = {}

    def note(manifest: Manifest, why: str) -> None:
        damaged[manifest.name] = why
        _log.error("%s", why)

    restore.newest_intact(store, deep=store.local_root is not None, on_damage=note)
    manifests = [manifest for manifest in catalog.committed() if manifest.name not in damaged]
    keeps_all = request.num_to_keep is None
    stored = tuple(
        e.Stored(
            name=manifest.name,
            index=manifest.index,
            iteration=manifest.iteration,
            generation=manifest.generation,
            metrics=dict(manifest.metrics),
            size_bytes=manifest.size_bytes,
            pinned=not keeps_all and expire.is_pinned(store, manifest.name),
        )
        for manifest in manifests
    )
    me = this_process()
    return e.ControllerBegan(
        epoch=lease.epoch,
        host=me.host,
        pid=me.pid,
        fingerprint=dict(request.fingerprint),
        stored=stored,
        damaged=tuple(damaged.items()),
        next_index=lease.floor,
    )


def _prepare(request: TrainRequest) -> Prepare:
    work_dir = local_cache_dir() / "work" / request.name
    return Prepare(
        function=cloudpickle.dumps(request.job),
        storage=join(request.storage_path, request.name),
        filesystem=None if request.filesystem is None else cloudpickle.dumps(request.filesystem),
        experiment=request.name,
        trial_id=request.name,
        trial_dir=join(request.storage_path, request.name),
        work_dir=str(work_dir),
        sys_path=[entry or str(os.getcwd()) for entry in sys.path],  # noqa: PTH109
        environment=dict(request.environment),
        preload=list(request.preload),
        change_directory=_wants_change_of_directory(),
        sync_artifacts=request.sync_artifacts,
    )


def _wants_change_of_directory() -> bool:
    for name in ("HOLDFAST_CHDIR_TO_TRIAL_DIR", "RAY_CHDIR_TO_TRIAL_DIR"):
        if name in os.environ:
            return os.environ[name] not in ("0", "false", "False")
    return True


def _engine_maker(request: TrainRequest) -> Any:
    slots_per_agent = -(-request.max_workers // max(1, request.nodes))

    def make(meeting: Meeting, on_gone: OnGone) -> Engine:
        return LocalEngine(meeting, slots_per_agent, on_gone)

    return make


def _observers(request: TrainRequest, store: Store, history: History) -> list[Observer]:
    observers: list[Observer] = [
        Terminal(sys.stderr, name=request.name, uri=store.uri, total_workers=request.max_workers, command=sys.argv),
        ResultFiles(store, history.records, params=dict(request.params)),
    ]
    if request.callbacks:
        observers.append(CallbackObserver(request.callbacks, request.run_context, store))
    return observers


# ---------------------------------------------------------------- during


def _drive(plan: Plan, lease: Lease) -> str:
    """Run the controller in its thread and wait for it, signals included."""
    journal = Journal(plan.store, lease.epoch)
    outcome: list[str | BaseException] = []
    ready = threading.Event()
    controllers: list[Controller] = []

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

    thread = threading.Thread(target=work, name="holdfast-controller")
    thread.start()
    ready.wait()
    with _signals_to(controllers[0]) if controllers else contextlib.nullcontext():
        while thread.is_alive():
            thread.join(timeout=3600)
    journal.close()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@contextlib.contextmanager
def _signals_to(controller: Controller) -> Iterator[None]:
    """Ctrl+C and SIGTERM stop the run; only the main thread may say so to Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        why = "Ctrl+C" if number == signal.SIGINT else signal.Signals(number).name
        controller.post_threadsafe(e.StopRequested(why=why, force=asked > 1))

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- after


def _outcome(store: Store, ended: Any, status: str) -> TrainOutcome:
    if isinstance(ended, r.RunFinished):
        return TrainOutcome(status="finished", uri=store.uri, store=store, return_value=ended.return_value)
    if isinstance(ended, r.RunInterrupted):
        return TrainOutcome(status="interrupted", uri=store.uri, store=store)
    assert isinstance(ended, r.RunFailed), (ended, status)
    return TrainOutcome(status="failed", uri=store.uri, store=store, error=run_error(ended, store.uri))


def run_error(ended: r.RunFailed, uri: str) -> HoldfastError:
    """The exception that a failed run raises from `fit()`."""
    if ended.error_type != "TrainingFailedError":
        from holdfast import errors

        kind = getattr(errors, ended.error_type, errors.RunError)
        error: HoldfastError = kind(ended.error)
        return error
    failures = {failure.rank: failure_error(failure) for failure in ended.failures}
    message = f"Training failed: {ended.error}. The same call continues from the last checkpoint in {uri}."
    return TrainingFailedError(message, failures)

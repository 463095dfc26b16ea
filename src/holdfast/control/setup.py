"""What a controller is made of, put together from the request and from what storage holds.

`run` calls this before anything starts: refusals and warnings come from here, while nothing has happened yet.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
from blake3 import blake3

from holdfast import __version__
from holdfast.agent.inline import RunInMain
from holdfast.agent.installed_torch import installed_torch
from holdfast.checkpoint import removal, restore
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.claims import create_once
from holdfast.checkpoint.epochs import epoch_key
from holdfast.checkpoint.manifest import Manifest, sealed
from holdfast.checkpoint.process_identity import this_process
from holdfast.checkpoint.timestamps import now_text
from holdfast.control.agent_link import Preparation
from holdfast.control.callbacks import CallbackObserver
from holdfast.control.fingerprint import SOURCE_CHANGED
from holdfast.control.history import RUN_FILE, History
from holdfast.control.job_pickle import pickle_job
from holdfast.control.lease import GuestLease, Lease
from holdfast.control.loop import ControllerSetup, RunOwner, Settings
from holdfast.control.request import TrainRequest
from holdfast.control.validation import PrepareValidation
from holdfast.control.wait_for_uploads import wait_for_uploads
from holdfast.control.working_dir import PackedDirectory, find_working_dir, pack_directory
from holdfast.core import events as e
from holdfast.core.admission import Gang, PlacementStrategy, capacity
from holdfast.core.checkpoint_types import ValidationTask
from holdfast.core.records import RunFinished
from holdfast.core.resources import GPU, Offer
from holdfast.core.retention import RetentionRule
from holdfast.core.spec import RunSpec
from holdfast.core.state import Durable, State
from holdfast.core.summary import Summary
from holdfast.engines.engine import ControllerEndpoint, Engine, EngineName, MakeEngine, OnChange
from holdfast.engines.inline import InlineEngine
from holdfast.engines.ray.bundles import GroupKind
from holdfast.errors import ConfigError
from holdfast.journal.fold import FoldWriter
from holdfast.linux.resources import cpu_count, memory_bytes, visible_gpus
from holdfast.printable import printable
from holdfast.runtime import current
from holdfast.storage.durability import volatile
from holdfast.storage.local_cache import local_cache_dir
from holdfast.storage.run_secret import make_secret
from holdfast.storage.store import Store
from holdfast.storage.uri import join
from holdfast.views.files.results import ResultFiles
from holdfast.views.formatting import size_text
from holdfast.views.observer import Observer
from holdfast.views.terminal.terminal import Terminal
from holdfast.wire.join_string import format_address
from holdfast.wire.messages import PrepareFunction, PrepareRun, StorageProbe

__all__ = [
    "agents_work_dir",
    "MakeObservers",
    "changes_of",
    "check_resources",
    "check_resume",
    "engine_of_run",
    "listen_address",
    "make_guest_setup",
    "make_observers",
    "make_preparation",
    "make_setup",
    "offers_of",
    "write_run_file",
]

_CHANGES_TOLD = 8
_log = logging.getLogger("holdfast")

MakeObservers = Callable[[Store, History, Lease], Sequence[Observer]]


def make_setup(
    request: TrainRequest,
    preparation: Preparation,
    store: Store,
    history: History,
    lease: Lease,
    make_observers: MakeObservers,
    make_engine: MakeEngine | None = None,
) -> ControllerSetup:
    """Everything that `Controller` needs, once the lease is held."""
    changes = changes_of(request, history)
    _warn_of_changes(request, store, history, changes)
    preparation = replace(preparation, run=_with_probe(preparation.run, request, store, lease))
    fold_writer = FoldWriter(store, lease.epoch, lease.id, history.run, deepcopy(history.summary))
    return ControllerSetup(
        store=store,
        run_id=history.run,
        state=State(_spec(request), history.durable),
        began=_begin(request, store, lease, history.durable, changes),
        preparation=preparation,
        gang=_gang(request, history.run),
        make_engine=make_engine,
        engine=request.ray or request.engine,
        known_offers=(lambda: offers_of(request)) if request.engine is EngineName.LOCAL else None,
        observers=[*make_observers(store, history, lease), fold_writer],
        fold_writer=fold_writer,
        settings=_settings(request),
        prepare_validation=_make_prepare_validation(request, preparation.run.probe),
    )


def make_guest_setup(
    request: TrainRequest,
    preparation: Preparation,
    store: Store,
    run: str,
    summary: Summary,
    lease: GuestLease,
    owner: RunOwner,
    *,
    holder: Store,
    has_checkpoint: bool = False,
    restart: bool = False,
) -> ControllerSetup:
    """Everything that the `Controller` of a lease's guest needs; `holder` is the directory of the lease. Of a run that
    was started before (`summary` has an epoch), what storage holds is looked at, and the fence is made first;
    so it is if a new one `has_checkpoint`, another's."""
    # A copy: the owner brings its own up to date with the same records.
    durable = deepcopy(summary.durable) if summary.durable.epoch else Durable()
    if durable.epoch == 0 and not has_checkpoint:
        began = e.ControllerBegan(epoch=lease.epoch, host=current().machine()[0], pid=current().pid())
    else:
        lease.make_fence()
        # Whoever starts a run again that had ended has a reason to, as changes would be.
        changes = ["it was paused"] if isinstance(durable.outcome, RunFinished) else []
        began = _begin(replace(request, resume="restart" if restart else "auto"), store, lease, durable, changes)
        began = msgspec.structs.replace(began, pinned=tuple(sorted({*began.pinned, *owner.pinned()})))
    return ControllerSetup(
        store=store,
        run_id=run,
        state=State(_spec(request), durable),
        began=began,
        preparation=replace(preparation, run=_with_probe(preparation.run, request, holder, lease)),
        gang=msgspec.structs.replace(_gang(request, run), local_agents=max(1, request.nodes)),
        engine=request.ray or request.engine,
        settings=_settings(request),
        owner=owner,
    )


def check_resume(request: TrainRequest, store: Store, history: History) -> None:
    """Refuse what `RunConfig(resume)` rules out, and the directory of an experiment."""
    if history.is_experiment:
        raise ConfigError(f"{store.uri} holds a tuning experiment: choose another name for this run.")
    if request.resume == "never" and history.exists:
        raise ConfigError(
            f'RunConfig(resume="never"): {store.uri} holds a run already; choose another name, or resume="auto".'
        )
    if request.resume == "must" and not history.exists and Catalog(store).newest() is None:
        raise ConfigError(
            f'RunConfig(resume="must"): no run at {store.uri}; check storage_path and name, or use resume="auto".'
        )


def write_run_file(request: TrainRequest, store: Store, *, is_experiment: bool = False) -> None:
    """Create run.json, unless it is there: the run, or experiment, gets its id. Durable once the lease is acquired with
    it."""
    identity: dict[str, Any] = {
        "format": "holdfast.run/1.0",
        "id": current().token_hex(4),
        "name": request.name,
        "trainer": request.trainer_name,
        "created_at": now_text(),
        "holdfast": __version__,
        "python": platform.python_version(),
    }
    if is_experiment:
        identity["experiment"] = True
    create_once(volatile(store), RUN_FILE, sealed(msgspec.json.encode(identity)))


def changes_of(request: TrainRequest, history: History) -> list[str]:
    """What differs from the script and the configuration with which the run was started last, for a person."""
    before = history.durable.fingerprint
    return request.fingerprint.changes_since(before) if before else []


def _warn_of_changes(request: TrainRequest, store: Store, history: History, changes: Sequence[str]) -> None:
    """A name that is used again with something else in it may be a mistake; and who waits for a complete run must know
    why it is not."""
    if not changes or request.resume == "restart":
        return
    told = "; ".join(changes[:_CHANGES_TOLD])
    if len(changes) > _CHANGES_TOLD:
        told += f"; and {len(changes) - _CHANGES_TOLD} more"
    if isinstance(history.durable.outcome, RunFinished):
        newest = history.durable.resume_point()
        source = f"from {newest.name}" if newest else "from the beginning, for it has no checkpoint"
        _log.warning(
            "%s was complete, and is called again %s, since it differs: %s.", store.uri, source, printable(told)
        )
    elif all(change.startswith(SOURCE_CHANGED) for change in changes):
        _log.warning("%s continues with changed code: %s.", store.uri, printable(told))  # what one does after a bug
    else:
        _log.warning(
            "%s continues, but not as it was started: %s. If this is another run, give it another name.",
            store.uri,
            printable(told),
        )


def _spec(request: TrainRequest) -> RunSpec:
    return RunSpec(
        workers_min=request.min_workers,
        workers_max=request.max_workers,
        last_call_s=request.last_call_s,
        spares=request.spares,
        resize_settle_s=request.resize_settle_s,
        max_failures=request.max_failures,
        max_preemption_failures=request.max_preemption_failures,
        stop_on_repeated_error=request.stop_on_repeated_error,
        progress_timeout_s=request.progress_timeout_s,
        agents_timeout_s=float(os.environ.get("HOLDFAST_AGENTS_TIMEOUT_S", "600")),
        backoff_base_s=float(os.environ.get("HOLDFAST_BACKOFF_S", "1")),
        target_overhead=request.target_overhead,
        has_callbacks=bool(request.callbacks),
        has_validation=request.validation is not None,
        retention=RetentionRule(request.num_to_keep, request.score_attribute, request.score_order),
    )


def _settings(request: TrainRequest) -> Settings:
    return Settings(
        refuse_conflicts=request.on_conflict == "error",
        storage_patience_s=float(os.environ.get("HOLDFAST_STORAGE_PATIENCE_S", "300")),
    )


def _begin(
    request: TrainRequest, store: Store, lease: Lease | GuestLease, durable: Durable, changes: Sequence[str]
) -> e.ControllerBegan:
    """Look at what storage really holds: shut what earlier controllers left open, and look for the newest commit whose
    files are all there. Their bytes are verified by the agents before workers start from them."""
    catalog = Catalog(store)
    far = None if request.engine is EngineName.LOCAL else store
    catalog.void_drafts(lease.epoch, lease.floor, functools.partial(wait_for_uploads, lease=lease, far=far))
    damaged: dict[str, str] = {}

    def note(manifest: Manifest, why: str) -> None:
        damaged[manifest.name] = why
        _log.error("%s", printable(why))

    survey = catalog.survey()
    restore.newest_intact(store, deep=False, on_damage=note, survey=survey)
    manifests = [manifest for manifest in catalog.committed(survey.fences) if manifest.name not in damaged]
    may_remove = request.num_to_keep is not None
    me = this_process()
    return e.ControllerBegan(
        epoch=lease.epoch,
        host=me.host,
        pid=me.pid,
        fingerprint=request.fingerprint.stored(durable.fingerprint),
        stored=tuple(manifest.stored for manifest in manifests),
        damaged=tuple(damaged.items()),
        pinned=tuple(one.name for one in manifests if may_remove and removal.is_pinned(store, one.name)),
        next_index=lease.floor,
        changes=tuple(changes[:_CHANGES_TOLD]),
        restart=request.resume == "restart",
    )


def _host_offer() -> Offer:
    """What this machine has for workers."""
    return Offer(resources={"CPU": cpu_count(), "memory": memory_bytes()}, gpus=tuple(visible_gpus()))


def offers_of(request: TrainRequest) -> list[Offer]:
    """What the run's engine has for workers, as far as is known before agents join."""
    if request.engine is not EngineName.RAY:
        return [_host_offer()] * max(1, request.nodes)
    from holdfast.engines.ray import cluster

    return [
        Offer(resources=dict(node.resources), gpus=tuple(map(str, range(int(node.resources.get(GPU, 0))))))
        for node in cluster.nodes()
    ]


def listen_address(request: TrainRequest) -> str | None:
    """Where agents of other machines are accepted: what was given, or with Ray where its nodes reach this one."""
    if request.listen is not None or request.engine is not EngineName.RAY:
        return request.listen
    from holdfast.engines.ray import cluster

    return format_address(cluster.driver_address(), 0)


def check_resources(request: TrainRequest) -> None:
    """Refuse what this machine, or no node of a Ray cluster, can ever give; what others that may join have is not
    known."""
    if request.ray is not None:
        from holdfast.engines.ray import cluster

        cluster.connect()
        cluster.check_feasible(GroupKind(tuple(sorted(request.resources.items())), request.min_workers), request.ray)
    if request.engine is not EngineName.LOCAL:
        return
    gang = _gang(request, "")
    here, offers = _host_offer(), offers_of(request)
    if request.local_mode or capacity(gang, offers) >= gang.needed:
        return
    if capacity(msgspec.structs.replace(gang, strategy=PlacementStrategy.PACK), offers) >= gang.needed:
        raise ConfigError(
            f"ScalingConfig(placement_strategy={gang.strategy.value!r}) cannot place {gang.needed} workers on this one "
            'machine: use "SPREAD", or let agents of other machines join (ScalingConfig(listen=...)).'
        )
    wanted = _amounts_text(gang.resources)
    has = _amounts_text({**here.resources, GPU: len(here.gpus)})
    if request.words.resources:
        raise ConfigError(f"{request.words.resources} asks for {wanted}, but this machine has {has}: ask for less.")
    raise ConfigError(
        f"ScalingConfig(num_workers={gang.needed}, resources_per_worker=...) asks for {wanted} for each worker, but "
        f"this machine has {has}: ask for less, or leave resources_per_worker out."
    )


def _amounts_text(amounts: Mapping[str, float]) -> str:
    """1 CPU, 2 GPU, 4.0 GiB memory."""
    texts = {name: size_text(int(amount)) if name == "memory" else f"{amount:g}" for name, amount in amounts.items()}
    return ", ".join(f"{texts[name]} {name}" for name in sorted(texts))


def _gang(request: TrainRequest, run: str) -> Gang:
    return Gang(
        run=run,
        workers=request.max_workers,
        min_workers=request.min_workers,
        resources=dict(request.resources),
        workers_per_agent=_workers_per_agent(request),
        spares=request.spares,
        strategy=request.placement,
        torch=(installed_torch() or "") if "torch" in request.preload else "",
    )


def _workers_per_agent(request: TrainRequest) -> int:
    """Local agents that stand in for nodes share the workers evenly; others have what they have slots for."""
    nodes = request.nodes if request.engine is EngineName.LOCAL else 1
    return -(-request.max_workers // max(1, nodes))


def make_preparation(request: TrainRequest) -> Preparation:
    """What agents are sent before they start workers; a function that cannot be sent is refused here."""
    pickled = pickle_job(request.job, request.words.function)
    function = b"" if request.local_mode else pickled.function  # checked, but nobody will open it
    sys_path = [entry or str(Path.cwd()) for entry in sys.path]
    environment, preload = dict(request.environment), list(request.preload)
    code = _pack_code(request)
    code_hash = "" if code is None else code.hash
    digest = blake3(function).hexdigest()
    key = blake3(
        msgspec.msgpack.encode([digest, sys_path, sorted(environment.items()), preload, code_hash])
    ).hexdigest()
    return Preparation(
        PrepareFunction(
            key=key,
            function=function,
            size_bytes=len(function),
            hash=digest,
            sys_path=sys_path,
            environment=environment,
            preload=preload,
            code_hash=code_hash,
        ),
        PrepareRun(
            function_key=key,
            config=None if request.local_mode else pickled.config,
            config_modules=pickled.config_modules,
            workers=_workers_per_agent(request),
            storage=join(request.storage_path, request.name),
            filesystem=None if request.filesystem is None else cloudpickle.dumps(request.filesystem),
            experiment=request.name,
            trial_id=request.name,
            trial_dir=join(request.storage_path, request.name),
            work_dir=agents_work_dir(request, request.storage_path, request.name),
            change_directory=_wants_change_of_directory(),
            sync_artifacts=request.sync_artifacts,
            sync_artifacts_on_checkpoint=request.sync_artifacts_on_checkpoint,
            sync_period_s=request.sync_period_s,
            sync_timeout_s=request.sync_timeout_s,
            max_restarts=request.max_failures,
            output_files=request.output_files,
        ),
        code,
    )


def _pack_code(request: TrainRequest) -> PackedDirectory | None:
    """The user's code, for agents on other machines."""
    if request.engine is EngineName.LOCAL:
        return None
    root = find_working_dir(request.working_dir)
    return None if root is None else pack_directory(root, request.excludes, request.storage_path)


def _with_probe(run: PrepareRun, request: TrainRequest, store: Store, lease: Lease | GuestLease) -> PrepareRun:
    """Agents of other machines may not see a directory of this one. The file of this lease, whose directory is the root
    of `store`, tells whether they do: no other has its id. Those that do not read each other's memory."""
    if request.engine is EngineName.LOCAL or (root := store.local_root) is None:
        return run
    probe = StorageProbe(root=str(root), file=str(root / epoch_key(lease.epoch)), text=lease.id)
    return msgspec.structs.replace(run, probe=probe, snapshot_key=make_secret())


def _make_prepare_validation(request: TrainRequest, probe: StorageProbe | None) -> PrepareValidation | None:
    """What agents that validate are sent: another function, with everything else as for training. It is pickled once,
    here; a function that cannot be sent is refused."""
    if (plan := request.validation) is None:
        return None
    made = make_preparation(replace(request, job=plan.job, local_mode=False, sync_artifacts=False))
    run = msgspec.structs.replace(made.run, workers=1, work_dir=f"{made.run.work_dir}/validation", probe=probe)

    def prepare(task: ValidationTask) -> tuple[Preparation, float | None]:
        config = cloudpickle.dumps(task.fn_kwargs)
        return replace(made, run=msgspec.structs.replace(run, config=config)), plan.timeout_s(task)

    return prepare


def agents_work_dir(request: TrainRequest, storage_path: str, name: str) -> str:
    """The directory in which the workers of a run are started: on other machines below their own caches."""
    path = _work_dir(storage_path, name)
    return str(path) if request.engine is EngineName.LOCAL else path.name


def _work_dir(storage_path: str, name: str) -> Path:
    digest = blake3(join(storage_path, name).encode()).hexdigest()[:8]
    return local_cache_dir() / "work" / f"{name}-{digest}"


def _wants_change_of_directory() -> bool:
    for name in ("HOLDFAST_CHDIR_TO_TRIAL_DIR", "RAY_CHDIR_TO_TRIAL_DIR"):
        if name in os.environ:
            return os.environ[name] not in ("0", "false", "False")
    return True


def engine_of_run(request: TrainRequest, run_in_main: RunInMain) -> MakeEngine | None:
    """The engine that only this run can use, in local mode; None: the hub's."""
    if not request.local_mode:
        return None

    def make(endpoint: ControllerEndpoint, on_change: OnChange) -> Engine:
        return InlineEngine(endpoint, on_change, request.job, run_in_main, request.torchrun)

    return make


def make_observers(
    request: TrainRequest,
    on_exit: Callable[[BaseException], None],
    store: Store,
    history: History,
    lease: Lease,
) -> list[Observer]:
    """The terminal, the result files, and the user's callbacks, with what becomes of an exception that is to leave
    `fit()`."""
    assert history.journal is not None, "run.json is written before the lease is acquired"
    observers: list[Observer] = [
        Terminal(
            sys.stderr,
            sys.stdout,
            name=request.name,
            uri=store.uri,
            quiet=True if request.verbose == 0 else None,
            prior=deepcopy(history.summary),
            work_dir=str(_work_dir(request.storage_path, request.name)) if _wants_change_of_directory() else "",
            config=request.run_context.train_loop_config,
        ),
        ResultFiles(
            store,
            history.journal,
            epoch=lease.epoch,
            lease=lease.id,
            params=dict(request.params),
            fenced=lease.is_fenced,
        ),
    ]
    if request.callbacks:
        callbacks = CallbackObserver(request.callbacks, request.run_context, store)
        callbacks.on_exit = on_exit
        observers.append(callbacks)
    return observers

"""`run_experiment`: from a request to results. What `Tuner.fit()` does, seen from the driver's main thread.

One lease and one journal for the experiment and all its trials. The machine is made anew and told everything that the
journal has, under the lease; then the controller goes on from there.
"""

from __future__ import annotations

import copy
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.process_identity import this_process
from holdfast.control import history
from holdfast.control.driver_thread import DriverThread
from holdfast.control.failures import run_error
from holdfast.control.group_commit import GroupCommit
from holdfast.control.history import RUN_FILE, run_id
from holdfast.control.hub import Hub
from holdfast.control.hub_thread import join_hub
from holdfast.control.job_pickle import pickle_config
from holdfast.control.lease import Lease, acquire, read_cuts
from holdfast.control.setup import check_resources, listen_address, offers_of, write_run_file
from holdfast.control.view import RunView
from holdfast.core import records as r
from holdfast.core.admission import Gang, capacity
from holdfast.core.commands import RunStatus
from holdfast.core.curve import Curve
from holdfast.errors import ConfigError, Fenced, NotFound, TrainingFailedError
from holdfast.journal.format import Line
from holdfast.journal.reader import JournalReader
from holdfast.journal.writer import Journal
from holdfast.runtime import current
from holdfast.storage.locate import open_store
from holdfast.storage.store import Store
from holdfast.storage.uri import join
from holdfast.train.config import ScalingConfig, SyncConfig
from holdfast.train.paths import split_run_path
from holdfast.train.request import plain_json
from holdfast.train.result import Result
from holdfast.train.trainer import DataParallelTrainer
from holdfast.tune.config import RunConfig, TuneConfig
from holdfast.tune.config_codec import ConfigCodec, ConfigTexts
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.experiment_control import ExperimentFacts, describe, describe_trial
from holdfast.tune.experiment_controller import ExperimentController, ExperimentSetup
from holdfast.tune.experiment_observer import replaying_machine
from holdfast.tune.experiment_request import ExperimentRequest, ExperimentSettings
from holdfast.tune.experiment_views import ExperimentViews
from holdfast.tune.function_trial import TrialFunction
from holdfast.tune.machine import ExperimentMachine, Policies, TrialState, make_result
from holdfast.tune.objective import find_objective
from holdfast.tune.result_grid import ResultGrid
from holdfast.tune.schedulers.trial_scheduler import FIFOScheduler, configure_scheduler
from holdfast.tune.search.basic_variant import BasicVariantGenerator
from holdfast.tune.search.searcher import configure_searcher
from holdfast.tune.search.variant_generator import Space
from holdfast.tune.stopper.resolve import make_stopper
from holdfast.tune.trainable import BoundTrainable, ClassTrial, Trainable, trainable_name
from holdfast.tune.trial_files import TrialFiles
from holdfast.tune.trial_names import TrialNames
from holdfast.tune.trial_setup import FunctionRequests, TrainerRequests, TrialRequests, TrialSetup
from holdfast.tune.user_code import describe_error
from holdfast.views.files.sinks import can_append
from holdfast.wire import control_messages as cm
from holdfast.wire.join_string import parse_join_string

__all__ = [
    "ExperimentOutcome",
    "fold_outcome",
    "is_experiment",
    "open_results",
    "read_outcome",
    "read_lines",
    "read_results",
    "read_settings",
    "read_status",
    "read_trial_status",
    "run_experiment",
    "trial_requests",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ExperimentOutcome:
    """How a call of `fit()` ended."""

    status: RunStatus
    results: ResultGrid
    interrupted_by: str = ""
    failed_fast: TrainingFailedError | None = None
    """Why all trials were stopped, if that was a trial's failure."""


def run_experiment(request: ExperimentRequest) -> ExperimentOutcome:
    """Run or continue an experiment to its end; raises only what kept it from starting, or a lost lease."""
    _check_checkpoints(request)
    requests = trial_requests(request)
    check_resources(requests.base)
    _make_machine(request, requests, request.settings(0), "")  # refuses what searcher and scheduler cannot do
    store = open_store(request.storage_path, request.run_config.storage_filesystem).sub(request.name)
    _check_directory(request, store)
    write_run_file(requests.base, store, is_experiment=True)
    base = requests.base
    controllers: list[ExperimentController] = []
    with ExitStack() as before_release:
        # The hub comes first: the lease says at which address control clients find it.
        hub = before_release.enter_context(join_hub())
        where = listen_address(base) or request.listen
        join_string = hub.listen(where, base.engine, store.local_root)
        address = parse_join_string(join_string)
        takeover = request.run_config.takeover
        lease = acquire(store, takeover=takeover, with_keys=[RUN_FILE], address=address, has_checkpoints=False)
        driver_thread = DriverThread()
        try:
            if request.on_listening is not None:
                request.on_listening(join_string)
            machine, views, setup = _make_setup(request, requests, store, lease)
            commit = GroupCommit(Journal(store, lease.epoch, lease.id))
            try:
                make_controller = partial(_make_controller, setup, lease, commit, controllers, views)
                status = hub.run(make_controller, driver_thread)
            finally:
                before_release.close()  # with the last run the agents end
                commit.close()
        finally:
            before_release.close()
            lease.release()
            driver_thread.close()
    if status is RunStatus.FENCED:
        raise Fenced(controllers[0].fenced_by)
    views.check()
    return _outcome(request, store, machine, status, controllers[0].interrupted_by)


def _outcome(
    request: ExperimentRequest,
    store: Store,
    machine: ExperimentMachine,
    status: RunStatus,
    interrupted_by: str,
    lines: list[Line] | None = None,
) -> ExperimentOutcome:
    results = _results(request, store, machine, lines)
    failed_fast = None if machine.failed_fast is None else _error(machine.failed_fast)
    return ExperimentOutcome(status, results, interrupted_by, failed_fast)


def _make_setup(
    request: ExperimentRequest, requests: TrialRequests, store: Store, lease: Lease
) -> tuple[ExperimentMachine, ExperimentViews, ExperimentSetup]:
    """The machine with everything that the journal has, and what goes on from there."""
    experiment_id, lines = read_lines(store)
    before = _settings(experiment_id, lines)
    _check_same_space(request, store, before)
    settings = request.settings(int(current().token_hex(4), 16) if before is None else before.seed)
    machine = _make_machine(request, requests, settings, experiment_id)
    for line in lines:
        machine.apply(line.run, line.record)
    me, now = this_process(), current().now()
    started = r.ExperimentStarted(
        at=now, epoch=lease.epoch, host=me.host, pid=me.pid, settings=msgspec.to_builtins(settings)
    )
    place = join(request.storage_path, request.name)
    views = ExperimentViews(request, requests.base, machine, store, place)
    files = TrialFiles()
    tune = request.tune_config
    setup = ExperimentSetup(
        store=store,
        machine=machine,
        begin=[started, *_resets(request, machine, now, before, settings)],
        make_trial=TrialSetup(
            requests, store, place, request.name, _awaits_decisions(request), files, can_append(store)
        ),
        facts=ExperimentFacts(
            name=request.name,
            uri=place,
            objective=find_objective(tune.metric, tune.mode),
            host=me.host,
            pid=me.pid,
            started_at=now,
        ),
        storage_patience_s=float(os.environ.get("HOLDFAST_STORAGE_PATIENCE_S", "300")),
        observers=[views.observer, files],
        metric=_required_metric(tune),
    )
    return machine, views, setup


def _make_controller(
    setup: ExperimentSetup,
    lease: Any,
    commit: GroupCommit,
    made: list[ExperimentController],
    views: ExperimentViews,
    hub: Hub,
) -> ExperimentController:
    made.append(ExperimentController(setup, lease, commit, hub))
    views.on_error(made[0].give_up_threadsafe)
    return made[0]


# ------------------------------------------------------------ reading


def is_experiment(store: Store) -> bool:
    """Whether the store's root is an experiment's directory."""
    try:
        return history.is_experiment(store.get(RUN_FILE))
    except NotFound:
        return False


def read_settings(store: Store) -> ExperimentSettings:
    """What the experiment was made with, the last time."""
    if is_experiment(store) and (found := _settings(*read_lines(store))) is not None:
        return found
    raise ConfigError(f"{store.uri} holds no experiment: check the path, which is <storage_path>/<name>.")


def read_results(request: ExperimentRequest) -> ResultGrid:
    """The trials as the journal has them now."""
    return read_outcome(request, RunStatus.RUNNING, "").results


def read_outcome(request: ExperimentRequest, status: RunStatus, interrupted_by: str) -> ExperimentOutcome:
    """How an experiment that another host led has ended."""
    store = open_store(request.storage_path, request.run_config.storage_filesystem).sub(request.name)
    read_settings(store)  # refuses what is no experiment
    return fold_outcome(request, status, interrupted_by, *read_lines(store))


def fold_outcome(
    request: ExperimentRequest,
    status: RunStatus,
    interrupted_by: str,
    experiment_id: str,
    lines: list[Line],
    *,
    is_sent: bool = False,
) -> ExperimentOutcome:
    """The same from the experiment's records, which are all that there is here if they were sent."""
    settings = _settings(experiment_id, lines)
    assert settings is not None
    store = open_store(request.storage_path, request.run_config.storage_filesystem).sub(request.name)
    machine = _make_machine(request, trial_requests(request), settings, experiment_id)
    for line in lines:
        machine.apply(line.run, line.record)
    return _outcome(request, store, machine, status, interrupted_by, lines if is_sent else None)


def open_results(storage_path: str, name: str, filesystem: object | None) -> ResultGrid:
    """The trials of an experiment of which only the place is known."""
    store = open_store(storage_path, filesystem).sub(name)
    tune = read_settings(store).tune
    request = ExperimentRequest(
        trainable=BoundTrainable(None),
        space={},
        tune_config=TuneConfig(metric=tune.get("metric"), mode=tune.get("mode")),
        run_config=RunConfig(name=name, storage_path=storage_path, storage_filesystem=filesystem),
        storage_path=storage_path,
        name=name,
    )
    return _results(request, store, _replayed(store)[0])


def read_status(store: Store) -> cm.ExperimentStatusReply:
    """How the experiment whose directory is the root of `store` stood when its last driver ended."""
    machine, settings = _replayed(store)
    tune = {} if settings is None else settings.tune
    objective = find_objective(tune.get("metric"), tune.get("mode"))
    return describe(machine, ExperimentFacts(name=split_run_path(store.uri)[1], uri=store.uri, objective=objective))


def read_trial_status(store: Store, trial: str) -> cm.TrialStatus:
    """The same of one of its trials, which there must be."""
    return describe_trial(_replayed(store)[0].trials[trial])


def _replayed(store: Store) -> tuple[ExperimentMachine, ExperimentSettings | None]:
    """An experiment of which only the place is known."""
    experiment_id, lines = read_lines(store)
    machine = replaying_machine(experiment_id, ConfigTexts())
    for line in lines:
        machine.apply(line.run, line.record)
    return machine, _settings(experiment_id, lines)


def read_lines(store: Store) -> tuple[str, list[Line]]:
    """The experiment's id, and every record of it and of its trials, in order."""
    experiment_id = run_id(store.get(RUN_FILE))
    return experiment_id, [line for _, line in JournalReader(store, read_cuts(store)).read()]


def _settings(experiment_id: str, lines: list[Line]) -> ExperimentSettings | None:
    for line in reversed(lines):
        if isinstance(line.record, r.ExperimentStarted) and line.run == experiment_id:
            return msgspec.convert(line.record.settings, ExperimentSettings)
    return None


# ------------------------------------------------------------ checking


def _check_checkpoints(request: ExperimentRequest) -> None:
    kept, trainable = request.run_config.checkpoint_config, request.trainable.trainable
    is_function = not isinstance(trainable, type | DataParallelTrainer)
    for name in ("checkpoint_frequency", "checkpoint_at_end"):
        if is_function and getattr(kept, name):
            raise ConfigError(
                f"CheckpointConfig({name}) is for classes derived from tune.Trainable: let the function call "
                "tune.report(metrics, checkpoint=...) when it wants one."
            )


def _required_metric(tune: TuneConfig) -> str | None:
    """By what trials are compared; None if nobody compares them, or where that was switched off as in Ray."""
    if os.environ.get("TUNE_DISABLE_STRICT_METRIC_CHECKING", "0") != "0":
        return None
    return tune.metric or (tune.scheduler.metric if tune.scheduler is not None else None)


def _check_directory(request: ExperimentRequest, store: Store) -> None:
    try:
        store.size(RUN_FILE)
    except NotFound:
        if request.must_exist or request.run_config.resume == "must":
            raise ConfigError(
                f"{store.uri} holds no experiment: check the path, which is <storage_path>/<name>."
            ) from None
        return
    if not is_experiment(store):
        raise ConfigError(f"{store.uri} holds a training run, not an experiment: choose another name.")
    if request.run_config.resume in ("never", "restart"):
        raise ConfigError(
            f'RunConfig(resume="{request.run_config.resume}"): {store.uri} holds an experiment already; choose another '
            'name, or resume="auto".'
        )


def _check_same_space(request: ExperimentRequest, store: Store, before: ExperimentSettings | None) -> None:
    if before is not None and before.space != request.settings(0).space:
        raise ConfigError(
            f"param_space is not what {store.uri} was begun with, so its trials could not be compared: give this "
            "search another name, or the old space."
        )


def _awaits_decisions(request: ExperimentRequest) -> bool:
    """Whether anybody may stop a trial because of what it reports."""
    scheduler = request.tune_config.scheduler
    return request.run_config.stop is not None or not (scheduler is None or type(scheduler) is FIFOScheduler)


# ------------------------------------------------------------ putting it together


def _make_machine(
    request: ExperimentRequest, requests: TrialRequests, settings: ExperimentSettings, experiment_id: str
) -> ExperimentMachine:
    """A machine that knows nothing yet."""
    tune = request.tune_config
    # Copies: these are told what happened from the beginning, at each call.
    given = _copied("TuneConfig(search_alg)", tune.search_alg)
    searcher = BasicVariantGenerator() if given is None else given
    scheduler = FIFOScheduler() if tune.scheduler is None else _copied("TuneConfig(scheduler)", tune.scheduler)
    constants = configure_searcher(
        searcher, tune.metric, tune.mode, request.space, num_samples=tune.num_samples, seed=settings.seed
    )
    configure_scheduler(scheduler, tune.metric, tune.mode, seed=settings.seed)
    policies = Policies(
        searcher,
        scheduler,
        make_stopper(_copied("RunConfig(stop)", request.run_config.stop)),
        constants,
        searcher.total_trials(tune.num_samples),
        _max_concurrent(request, requests),
        bool(request.run_config.failure_config.fail_fast),
        tune.time_budget_s,  # type: ignore[arg-type]  # seconds by now
        tune.budget,
        request.space,
    )
    names = TrialNames(trainable_name(request.trainable), request.space, tune)
    return ExperimentMachine(experiment_id, policies, names, ConfigCodec(request.space, constants))


def _copied(field: str, value: _T) -> _T:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise ConfigError(
            f"{field} is copied at each call, and cannot be ({describe_error(error)}): let it make locks, connections "
            "and the like when it first needs them."
        ) from error


def _max_concurrent(request: ExperimentRequest, requests: TrialRequests) -> int:
    """As many as was said, or as the machine has room for."""
    if given := request.tune_config.max_concurrent_trials:
        return given
    base = requests.base
    if request.workers is not None:
        return max(1, request.workers // max(1, base.max_workers))
    gang = Gang(run="", workers=100_000, resources=dict(base.resources))
    here = capacity(gang, offers_of(base))
    return max(1, here // max(1, base.max_workers))


def _resets(
    request: ExperimentRequest,
    machine: ExperimentMachine,
    at: float,
    before: ExperimentSettings | None,
    now: ExperimentSettings,
) -> list[r.Record]:
    """Trials that run again although they had come to an end, and those that do not go on although they had not."""
    records: list[r.Record] = []
    is_stop_changed = before is not None and before.stop != now.stop
    is_at_limit = bool(machine.find_limit())
    for trial in machine.trials.values():
        stopped = trial.stopped if trial.status == TrialState.TERMINATED else None
        if is_stop_changed and stopped is not None and stopped.by == "stopper" and not trial.is_long_enough:
            records.append(r.TrialReset(at=at, trial=trial.trial_id))
            continue
        if stopped is not None and stopped.by == "experiment" and request.resume_unfinished and not is_at_limit:
            records.append(r.TrialReset(at=at, trial=trial.trial_id))
            continue
        if trial.status == TrialState.ERROR and request.errored != "leave":
            records.append(r.TrialReset(at=at, trial=trial.trial_id, restart=request.errored == "restart"))
        elif not trial.is_finished() and not request.resume_unfinished:
            iteration = trial.summary.iteration
            records.append(r.TrialStopped(at=at, trial=trial.trial_id, iteration=iteration, by="stop_trial"))
    return records


def trial_requests(request: ExperimentRequest) -> TrialRequests:
    """How the trials of the experiment are run."""
    bound = request.trainable
    run_config = replace(
        request.run_config,
        name=request.name,
        storage_path=request.storage_path,
        callbacks=None,
        stop=None,
        progress_reporter=None,
        sync_config=_artifacts_only(request.run_config.sync_config),
        checkpoint_config=replace(request.run_config.checkpoint_config),
    )
    if isinstance(bound.trainable, DataParallelTrainer):

        def configure(trainer: DataParallelTrainer) -> None:
            trainer.run_config = run_config
            if request.initial_checkpoint is not None:
                trainer.resume_from_checkpoint = request.initial_checkpoint

        return TrainerRequests(bound.trainable, configure)
    pickle_config(Space(request.space).constants(), "param_space")  # refuses what no trial could be sent
    trainer = DataParallelTrainer(
        _function(bound, request),
        train_loop_config={},
        scaling_config=_scaling(bound),
        run_config=run_config,
        resume_from_checkpoint=request.initial_checkpoint,
    )
    return FunctionRequests(trainer)


def _artifacts_only(config: SyncConfig) -> SyncConfig:
    """What workers do of it."""
    return SyncConfig(
        sync_period=config.sync_period,
        sync_artifacts=config.sync_artifacts,
        sync_artifacts_on_checkpoint=config.sync_artifacts_on_checkpoint,
    )


def _function(bound: BoundTrainable, request: ExperimentRequest) -> TrialFunction:
    function = bound.function()
    if isinstance(bound.trainable, type) and issubclass(bound.trainable, Trainable):
        checkpoints = request.run_config.checkpoint_config
        frequency = checkpoints.checkpoint_frequency or 0
        function = ClassTrial(bound.trainable, frequency, bool(checkpoints.checkpoint_at_end), bound.parameters)
    return TrialFunction(function, _resources(bound))


def _resources(bound: BoundTrainable) -> dict[str, float]:
    return dict(bound.resources) if bound.resources is not None else {"CPU": 1.0}


def _scaling(bound: BoundTrainable) -> ScalingConfig:
    resources = _resources(bound)
    return ScalingConfig(num_workers=1, use_gpu=bool(resources.get("GPU")), resources_per_worker=resources)


# ------------------------------------------------------------ results


def _results(
    request: ExperimentRequest, store: Store, machine: ExperimentMachine, lines: list[Line] | None = None
) -> ResultGrid:
    """`lines` are the experiment's records; None: they are read again where they are needed."""
    place, filesystem = join(request.storage_path, request.name), request.run_config.storage_filesystem
    for trial in machine.trials.values():
        trial.path = join(place, trial.directory)
        trial.error = _error(trial)

    def open_result(trial: Trial) -> Result:
        assert isinstance(trial, TrialState)
        return Result._of_run(Checkpoint(trial.path, filesystem), _view(trial))

    return ResultGrid(
        list(machine.trials.values()),
        open_result,
        partial(_read_histories, store, machine, lines),
        experiment_path=place,
        filesystem=filesystem,
        metric=request.tune_config.metric,
        mode=request.tune_config.mode,
    )


def _error(trial: TrialState) -> TrainingFailedError | None:
    outcome = trial.summary.durable.outcome
    if trial.status != Trial.ERROR or not isinstance(outcome, r.RunFailed):
        return None
    return run_error(outcome, trial.path, "Tuner.restore(..., resume_errored=True) continues the trial")


def _view(trial: TrialState) -> RunView:
    """What the journal knows of the trial, without a look at its directory."""
    durable, started = trial.summary.durable, trial.summary.started
    checkpoints = sorted(durable.checkpoints.values(), key=lambda one: one.order)
    return RunView(
        metrics=dict(trial.last_result) or None,
        checkpoints=[one for one in checkpoints if one.index >= durable.first_index],
        error=_error(trial),
        params=plain_json(trial.config),
        score_attribute=started.score_attribute if started else None,
        num_to_keep=started.num_to_keep if started else None,
        score_order="min" if started and started.score_order == "min" else "max",
    )


def _read_histories(
    store: Store, machine: ExperimentMachine, lines: list[Line] | None
) -> dict[str, list[dict[str, Any]]]:
    """All reports that count, by trial, with what is added to each."""
    curves = {trial_id: Curve() for trial_id in machine.trials}
    rows: dict[str, list[dict[str, Any]]] = {trial_id: [] for trial_id in machine.trials}
    for line in read_lines(store)[1] if lines is None else lines:
        if (curve := curves.get(line.run)) is None:
            continue
        change = curve.apply(line.record)
        del rows[line.run][change.kept_rows :]
        if change.row is not None:
            rows[line.run].append(make_result(machine.trials[line.run], change.row))
    return rows

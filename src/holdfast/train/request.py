"""From a trainer to the controller's `TrainRequest`: every default filled in, everything that can be wrong checked.

This is the last stop before processes start. The fingerprint (`code_fingerprint`) tells whether a run that is there
already was made by the same script.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.control.request import RequestWords, RunContext, TrainRequest
from holdfast.core.admission import PlacementStrategy
from holdfast.core.masking import masked
from holdfast.engines.engine import EngineName
from holdfast.engines.ray.options import RayOptions
from holdfast.errors import ConfigError
from holdfast.linux.resources import visible_gpus
from holdfast.storage.uri import scheme_of
from holdfast.train import checks
from holdfast.train.code_fingerprint import fingerprint
from holdfast.train.config import RunConfig, ScalingConfig
from holdfast.train.engine_choice import asked_engine
from holdfast.train.paths import resolve_storage_path
from holdfast.train.runtime import init_environment, init_runtime_env, init_working_dir
from holdfast.train.worker_inputs import WithInputs, WorkerInputs
from holdfast.worker.job import Framework, Job
from holdfast.worker.session import installed, is_installed
from holdfast.worker.torchrun import Torchrun

if TYPE_CHECKING:
    from holdfast.train.trainer import DataParallelTrainer

__all__ = ["build_request", "check_function", "is_one_of_torchrun", "plain_json"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_function(function: Callable[..., Any], config: dict[str, Any] | None) -> bool:
    """Whether the training function takes the configuration; a `ConfigError` if it is no such function."""
    if not callable(function):
        raise ConfigError(f"train_loop_per_worker must be a function, not {function!r}.")
    if config is not None and not (isinstance(config, dict) and all(isinstance(key, str) for key in config)):
        raise ConfigError("train_loop_config must be a dict with str keys, or None.")
    parameters = inspect.signature(function).parameters.values()
    positional = [one for one in parameters if one.kind in _POSITIONAL]
    required = [one for one in positional if one.default is one.empty]
    keywords = [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is one.empty]
    if len(required) > 1 or keywords:
        names = ", ".join(one.name for one in [*required, *keywords])
        raise ConfigError(
            f"train_loop_per_worker takes the arguments {names}, but it is called with train_loop_config or with "
            "nothing: put the rest into train_loop_config, or use functools.partial."
        )
    takes = bool(positional) or any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
    if config and not takes:
        warnings.warn(
            "train_loop_config is given, but train_loop_per_worker takes no argument and will not see it.",
            stacklevel=3,
        )
    return takes


_TRAIN_WORDS = RequestWords()


def build_request(
    trainer: DataParallelTrainer,
    takes_config: bool,
    framework: Framework | None,
    preload: tuple[str, ...],
    words: RequestWords = _TRAIN_WORDS,
) -> TrainRequest:
    """Everything that the controller needs to know. `words` are the user's, for errors."""
    run, scaling, config = trainer.run_config, trainer.scaling_config, trainer.train_loop_config
    if run.sync_config.upload_dir is not None and run.sync_config.storage_path is None:
        raise ConfigError(
            "SyncConfig(syncer): a Syncer copies experiments of a Tuner; a trainer stores everything in upload_dir by "
            "itself, so leave the syncer out."
        )
    preload = ("holdfast.train.functions", *preload)  # nearly every function calls some of these
    local_mode = scaling.num_workers == 0
    listen = None if local_mode else _listen(scaling)
    working_dir, excludes = _working_dir(run)
    engine = _engine(scaling, listen)
    if engine is EngineName.LOCAL:
        _check_gpus(scaling, words.resources)
    torchrun = _torchrun(run) if is_one_of_torchrun(scaling.num_workers) else None
    context = RunContext(
        name=run.name or "",  # `RunConfig` makes one up
        storage_path=resolve_storage_path(run),
        trainer_name=type(trainer).__name__,
        train_loop_config=config,
        scaling_config=scaling,
        run_config=run,
    )
    _check_seen(context.storage_path, run)
    plain_config = plain_json(config) if config is not None else None
    return TrainRequest(
        job=_job(trainer, takes_config, framework, local_mode=local_mode),
        words=words,
        trainer_name=context.trainer_name,
        storage_path=context.storage_path,
        filesystem=run.storage_filesystem,
        name=context.name,
        min_workers=max(1, scaling.min_workers),
        max_workers=max(1, scaling.max_workers),
        last_call_s=float(scaling.last_call_timeout),
        spares=0 if local_mode else scaling.spares,
        resize_settle_s=float(scaling.elastic_resize_monitor_interval_s),
        local_mode=local_mode,
        placement=PlacementStrategy.PACK if engine is EngineName.RAY else PlacementStrategy(scaling.placement_strategy),
        nodes=1 if local_mode else _local_nodes(),
        engine=engine,
        listen=listen,
        working_dir=working_dir,
        excludes=excludes,
        ray=_ray_options(scaling, run, preload) if engine is EngineName.RAY else None,
        resources={} if local_mode else _resources(scaling, engine),
        max_failures=run.failure_config.max_failures,
        max_preemption_failures=run.failure_config.max_preemption_failures,
        stop_on_repeated_error=run.failure_config.stop_on_repeated_error,
        progress_timeout_s=run.failure_config.progress_timeout_s,
        num_to_keep=run.checkpoint_config.num_to_keep,
        score_attribute=run.checkpoint_config.checkpoint_score_attribute,
        score_order=run.checkpoint_config.checkpoint_score_order,
        on_conflict=run.checkpoint_config.on_conflict,
        target_overhead=run.checkpoint_config.target_overhead,
        takeover=run.takeover,
        resume=run.resume,
        sync_artifacts=run.sync_config.sync_artifacts,
        sync_period_s=run.sync_config.sync_period,
        sync_timeout_s=run.sync_config.sync_timeout,
        sync_artifacts_on_checkpoint=run.sync_config.sync_artifacts_on_checkpoint
        and run.sync_config.sync_on_checkpoint,
        output_files=checks.output_files("RunConfig(log_to_file)", run.log_to_file),
        callbacks=tuple(checks.callbacks("RunConfig(callbacks)", run.callbacks)),
        run_context=context,
        validation=trainer.validation_config,
        preload=preload,
        fingerprint=fingerprint(trainer.train_loop_per_worker, config),
        params={"train_loop_config": masked("", plain_config or {})},
        verbose=0 if run.is_quiet else 1 if run.verbose is None else run.verbose,
        environment=_environment(trainer),
        torchrun=torchrun,
    )


def _job(trainer: DataParallelTrainer, takes_config: bool, framework: Framework | None, *, local_mode: bool) -> Job:
    function = trainer.train_loop_per_worker
    inputs = WorkerInputs(
        datasets=trainer.checked_datasets,
        metadata=trainer.metadata or {},
        initial_checkpoint=trainer.resume_from_checkpoint,
        context=trainer.backend_config.train_func_context,
    )
    if inputs:
        function = WithInputs(function, inputs)
    config = trainer.train_loop_config or ({} if takes_config else None)
    if local_mode:  # elsewhere it is pickled; what the function does to it must not be a change of the script
        config = _copied(config)
    return Job(function=function, config=config, takes_config=takes_config, framework=framework)


def _copied(value: Any, depth: int = 0) -> Any:
    """The same in dicts and lists of its own."""
    if type(value) is dict and depth < 32:
        return {key: _copied(item, depth + 1) for key, item in value.items()}
    if type(value) is list and depth < 32:
        return [_copied(item, depth + 1) for item in value]
    return value


def _environment(trainer: DataParallelTrainer) -> dict[str, str]:
    given = trainer.run_config.worker_runtime_env
    # Workers run in a directory of the run's; scripts that were written for Ray find the driver's by this variable.
    directory: dict[str, str] = {}
    outer = os.environ.get("TUNE_ORIG_WORKING_DIR") if is_installed() else None
    with suppress(FileNotFoundError):  # it was removed
        directory["TUNE_ORIG_WORKING_DIR"] = outer or str(Path.cwd())
    variables = directory | init_environment() | checks.runtime_environment("RunConfig(worker_runtime_env)", given)
    if trainer.scaling_config.use_gpu:
        return variables | {"HOLDFAST_USE_GPU": "1"}
    return variables | {"HOLDFAST_USE_GPU": "0"} if is_installed() else variables


def _check_seen(storage_path: str, run: RunConfig) -> None:
    """In a worker whose machine does not see its own run's directory, a directory is no place for another run."""
    session = installed()
    is_directory = scheme_of(storage_path) in (None, "file") and run.storage_filesystem is None
    if session is None or session.assignment.served is None or not is_directory:
        return
    raise ConfigError(
        f"RunConfig(storage_path={storage_path!r}) in a worker on a machine that does not see the storage of its own "
        "run: the driver would not find what is stored there, so give both runs a path that all machines see, such as "
        "s3://bucket/runs."
    )


def _resources(scaling: ScalingConfig, engine: EngineName) -> dict[str, float]:
    """What each worker takes of its machine. A CPU only where that was asked for, or of a cluster that is shared: more
    workers than CPUs are common where the function is tried out."""
    if engine is EngineName.RAY:
        if not scaling.worker_resources:
            raise ConfigError(
                "ScalingConfig(resources_per_worker) asks for nothing, but a Ray cluster can only place what takes "
                'something: ask for a share such as {"CPU": 0.5}.'
            )
        return {name: float(amount) for name, amount in scaling.worker_resources.items()}
    asked = {name: float(amount) for name, amount in (scaling.resources_per_worker or {}).items() if amount}
    if scaling.use_gpu:
        asked.setdefault("GPU", 1.0)
    return asked


def _ray_options(scaling: ScalingConfig, run: RunConfig, imports: tuple[str, ...]) -> RayOptions:
    selectors = scaling.label_selector or ()
    each = (selectors,) if isinstance(selectors, Mapping) else selectors
    given = dict(run.worker_runtime_env or {})
    environment = {**init_runtime_env(), **given}
    if variables := {**init_environment(), **given.get("env_vars", {})}:
        environment["env_vars"] = variables
    return RayOptions(
        placement_strategy=scaling.placement_strategy,
        label_selectors=tuple(tuple(sorted(one.items())) for one in each),
        runtime_env=environment,
        imports=imports,
    )


def _working_dir(run: RunConfig) -> tuple[str | None, tuple[str, ...]]:
    """What the run was given, or `init`."""
    found = checks.working_directory("RunConfig(worker_runtime_env)", run.worker_runtime_env)
    return found if found != (None, ()) else init_working_dir()


def _listen(scaling: ScalingConfig) -> str | None:
    if is_installed():
        if scaling.listen is not None:
            raise ConfigError(
                f"ScalingConfig(listen={scaling.listen!r}) in a worker of another run: a run that is started there has "
                "its workers on that worker's machine, so leave it out."
            )
        return None  # the variable is meant for the run around this one
    if scaling.listen is not None:
        return scaling.listen
    given = os.environ.get("HOLDFAST_LISTEN", "").strip() or None
    checks.address("HOLDFAST_LISTEN", given)
    return given


def _engine(scaling: ScalingConfig, listen: str | None) -> EngineName:
    """What was asked for; agents of other machines are wanted where they can connect."""
    if scaling.num_workers == 0:
        return EngineName.LOCAL
    if (asked := asked_engine(scaling.engine)) is not None:
        return asked
    from holdfast.wire.join_string import is_loopback_name, parse_address

    return EngineName.LOCAL if listen is None or is_loopback_name(parse_address(listen, "")[0]) else EngineName.JOIN


def _check_gpus(scaling: ScalingConfig, asked_by: str) -> None:
    if not scaling.use_gpu:
        return
    wanted = scaling.worker_resources.get("GPU", 1) * max(1, scaling.min_workers)
    there = len(visible_gpus())
    if there < wanted and asked_by:
        raise ConfigError(f"{asked_by} asks for {wanted:g} GPU, but this machine has {there or 'none'}: ask for less.")
    if there < wanted and is_installed():
        raise ConfigError(
            f"ScalingConfig(use_gpu=True, num_workers={scaling.num_workers}) needs {wanted:g} GPU, but the worker that "
            f"starts this run has {there or 'none'}: give it as many, as tune.with_resources does for a trial."
        )
    if there < wanted:
        raise ConfigError(
            f"ScalingConfig(use_gpu=True, num_workers={scaling.num_workers}) needs {wanted:g} GPU, but this machine "
            f"has {there or 'none'}: set use_gpu=False, or fewer workers."
        )


def is_one_of_torchrun(num_workers: int | tuple[int, int]) -> bool:
    """Whether this process is one of several that torchrun started for a script with local mode, each of which runs the
    function. Workers of ours have the same variables, and may start a run inside one."""
    several = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    return num_workers == 0 and several and not is_installed()


def _torchrun(run: RunConfig) -> Torchrun:
    count = os.environ["WORLD_SIZE"]
    if os.environ.get("HOLDFAST_WORKER") == os.environ["TORCHELASTIC_RUN_ID"]:
        raise ConfigError(
            f"ScalingConfig(num_workers=0) in a process that one of {count} workers of another run started: remove "
            "RANK, WORLD_SIZE and TORCHELASTIC_RUN_ID from its environment, for it is not a rank of its own run."
        )
    if run.failure_config.max_failures != 0:
        raise ConfigError(
            f"FailureConfig(max_failures={run.failure_config.max_failures}) with num_workers=0 under torchrun: it is "
            "torchrun that starts these processes again, so use its --max-restarts, and max_failures=0."
        )
    return Torchrun(os.environ)


def _local_nodes() -> int:
    text = os.environ.get("HOLDFAST_LOCAL_NODES", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"HOLDFAST_LOCAL_NODES must be a whole number of 1 or more, not {text!r}.")
    return int(text)


def plain_json(value: Any, depth: int = 0) -> Any:
    """The configuration as JSON: what JSON cannot say is named by its type, never by an address in memory."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)
    if isinstance(value, float):
        return value if value - value == 0 else repr(value)  # JSON has neither NaN nor infinities.
    if depth < 32 and isinstance(value, dict):
        return {str(key): plain_json(item, depth + 1) for key, item in value.items()}
    if depth < 32 and isinstance(value, list | tuple):
        return [plain_json(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain_json(item, depth + 1) for item in value), key=repr)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return f"<{type(value).__module__}.{type(value).__qualname__}>"

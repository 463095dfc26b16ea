"""The settings of a run, with the field names and defaults that users of Ray Train know.

Each is checked when it is made, so that a mistake is one sentence at the user's own line and no worker ever starts on
it. `trainer` brings them together; what depends on the machine (GPUs) or on the function is checked there. The checks
themselves are in `checks`.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from holdfast.core.resources import find_problem
from holdfast.engines.engine import EngineName
from holdfast.errors import ConfigError
from holdfast.storage.locate import default_storage_path
from holdfast.train import checks
from holdfast.train.engine_choice import asked_engine

__all__ = [
    "CheckpointConfig",
    "FailureConfig",
    "LoggingConfig",
    "PlacementGroupFactory",
    "RunConfig",
    "ScalingConfig",
    "SyncConfig",
]


@dataclass
class ScalingConfig:
    """How many workers, and what each of them gets.

    `num_workers=0` is local mode: the function runs in the calling process, for breakpoints, or in each process
    of torchrun. `placement_strategy`: "PACK" fills one node after the other, "SPREAD" spreads workers evenly as far as
    there is room, "STRICT_PACK" puts all on one node, and "STRICT_SPREAD" each on one of its own; a node is an agent.
    `accelerator_type` and what follows it mean something to a cluster and are kept for it. The order of the fields is
    Ray's; what follows is ours.

    `engine`: "local" starts the workers on this machine; "join" uses agents that join by themselves (`holdfast agent`,
    docs/hosts.md), and is the default where `listen` is not an address of loopback; "ray" uses the nodes of a Ray
    cluster (docs/ray.md), and is the default inside a Ray job. HOLDFAST_ENGINE takes its place where it is None.
    `num_workers=(2, 6)` is an elastic run: it starts with 2 workers or more, after a last call for others of
    `last_call_timeout` seconds, goes on with what is left when nodes are lost or drained, and grows at a checkpoint
    when there has been room for `elastic_resize_monitor_interval_s`.
    `spares=1` keeps an agent besides that is prepared and idle, so that a lost node's workers start elsewhere at once.
    `listen`: `HOST:PORT` at which agents of other machines are accepted (HOLDFAST_LISTEN); port 0 is any that is free.
    """

    trainer_resources: Mapping[str, float] | None = None
    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    use_tpu: bool = False
    topology: str | None = None
    elastic_resize_monitor_interval_s: float = 60.0
    engine: str | None = field(default=None, kw_only=True)
    listen: str | None = field(default=None, kw_only=True)
    last_call_timeout: float = field(default=5.0, kw_only=True)
    spares: int = field(default=0, kw_only=True)

    def __repr__(self) -> str:
        """Without what is as by default: it stands in names and tables where it is searched."""
        changed = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return f"ScalingConfig({', '.join(f'{one.name}={getattr(self, one.name)!r}' for one in changed)})"

    def __post_init__(self) -> None:
        self._check_num_workers()
        if self.last_call_timeout != 0:
            checks.seconds("ScalingConfig(last_call_timeout)", self.last_call_timeout)
        checks.whole_number("ScalingConfig(spares)", self.spares, least=0)
        checks.seconds("ScalingConfig(elastic_resize_monitor_interval_s)", self.elastic_resize_monitor_interval_s)
        checks.flag("ScalingConfig(use_gpu)", self.use_gpu)
        self._check_resources()
        if self.use_tpu or self.topology is not None:
            raise ConfigError("ScalingConfig(use_tpu, topology): TPUs are not supported; leave both out.")
        checks.one_of(
            "ScalingConfig(placement_strategy)",
            self.placement_strategy,
            ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
        )
        selectors = self.label_selector
        if isinstance(selectors, list | tuple) and len(selectors) != self.max_workers:
            raise ConfigError(
                f"ScalingConfig(label_selector) has {len(selectors)} entries for {self.max_workers} workers: give one "
                "for each worker, or one for all."
            )
        if self.engine is not None:
            checks.one_of("ScalingConfig(engine)", self.engine, tuple(EngineName))
        checks.address("ScalingConfig(listen)", self.listen)
        if self.spares and self.placement_strategy == "STRICT_PACK":
            raise ConfigError(
                'ScalingConfig(spares) keeps a node for some of the workers, but placement_strategy="STRICT_PACK" puts '
                "all on one; leave spares out."
            )
        for_ray = asked_engine(self.engine) is EngineName.RAY
        unplaced = () if for_ray else ("accelerator_type", "label_selector")
        fixed = "the number of workers is fixed."
        checks.has_no_effect(
            self,
            {
                **dict.fromkeys(unplaced, "workers run on this one machine."),
                "trainer_resources": "the driver reserves nothing for itself.",
            }
            | ({"spares": "in local mode there is no agent."} if self.num_workers == 0 else {})
            | ({} if self.elasticity_enabled else {"elastic_resize_monitor_interval_s": fixed}),
        )

    def _check_num_workers(self) -> None:
        given = self.num_workers
        if isinstance(given, list | tuple):
            whole = all(isinstance(one, int) and not isinstance(one, bool) for one in given)
            if len(given) != 2 or not whole or not 1 <= given[0] <= given[1]:
                raise ConfigError(
                    f"ScalingConfig(num_workers={given!r}): a range is (fewest, most), two whole numbers of 1 or more, "
                    "the first not above the second."
                )
            self.num_workers = (given[0], given[1])
        else:
            checks.whole_number("ScalingConfig(num_workers)", given, least=0)

    def _check_resources(self) -> None:
        resources = checks.resources("ScalingConfig(resources_per_worker)", self.resources_per_worker)
        checks.resources("ScalingConfig(trainer_resources)", self.trainer_resources)
        if problem := find_problem(resources):
            raise ConfigError(f"ScalingConfig(resources_per_worker): {problem}.")
        gpus = resources.get("GPU")
        if gpus and not self.use_gpu:
            raise ConfigError(
                f"ScalingConfig(resources_per_worker) asks for {gpus:g} GPU but use_gpu is False: set use_gpu=True."
            )
        if gpus == 0 and self.use_gpu:
            raise ConfigError(
                'ScalingConfig(use_gpu=True) and resources_per_worker["GPU"] of 0 contradict each other: drop one.'
            )
        if resources.get("TPU"):
            raise ConfigError('ScalingConfig(resources_per_worker) asks for a "TPU": TPUs are not supported.')

    @property
    def worker_resources(self) -> dict[str, float]:
        """What one worker gets: a GPU with `use_gpu` or otherwise a CPU, unless something else was asked for."""
        if self.resources_per_worker is None:
            resources: dict[str, float] = {} if self.use_gpu else {"CPU": 1}
        else:
            resources = {name: amount for name, amount in self.resources_per_worker.items() if amount}
        if self.use_gpu:
            resources.setdefault("GPU", 1)
        if self.accelerator_type:
            resources.setdefault(f"accelerator_type:{self.accelerator_type}", 0.001)
        return resources

    @property
    def total_resources(self) -> dict[str, float]:
        """What all workers get together."""
        return {name: amount * self.max_workers for name, amount in self.worker_resources.items()}

    @property
    def num_cpus_per_worker(self) -> float:
        return self.worker_resources.get("CPU", 0)

    @property
    def num_gpus_per_worker(self) -> float:
        return self.worker_resources.get("GPU", 0)

    @property
    def num_tpus_per_worker(self) -> float:
        return self.worker_resources.get("TPU", 0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """What a worker gets besides CPUs and GPUs."""
        return {name: amount for name, amount in self.worker_resources.items() if name not in ("CPU", "GPU")}

    @property
    def min_workers(self) -> int:
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def elasticity_enabled(self) -> bool:
        """Whether the number of workers may change during a run."""
        return self.min_workers != self.max_workers

    def as_placement_group_factory(self) -> PlacementGroupFactory:
        """What the workers need, as Ray Tune writes it down."""
        bundles = [self.worker_resources for _ in range(max(1, self.max_workers))]
        return PlacementGroupFactory(bundles, self.placement_strategy)


@dataclass(frozen=True)
class PlacementGroupFactory:
    """Resources by worker and how to place them. Nothing here reserves them: it is for scripts that look at it."""

    bundles: list[dict[str, float]]
    strategy: str = "PACK"

    @property
    def required_resources(self) -> dict[str, float]:
        """The sum over all workers."""
        names = dict.fromkeys(name for bundle in self.bundles for name in bundle)
        return {name: sum(bundle.get(name, 0) for bundle in self.bundles) for name in names}


@dataclass
class FailureConfig:
    """What a run survives. Crashes of the driver, and interrupts, never count.

    `max_failures`: failures of workers that are survived; 0 is none, -1 any number.
    `max_preemption_failures`: the same for losses of nodes that were being drained, and workers with them; these do not
    count as failures, nor does a node that had to be left without a last checkpoint. One that could be left with one
    counts nowhere.
    `progress_timeout_s` (ours): a group that reports nothing for so long is taken for hung and is replaced.
    `stop_on_repeated_error` (ours): an exception of the training function that comes twice in a row, with the same
    message at the same line after the same iteration and without a checkpoint in between, ends the run: it would come
    again. Errors of the machine, the network or a device do not count as such.
    """

    max_failures: int = 0
    fail_fast: bool | str = False
    controller_failure_limit: int = -1
    max_preemption_failures: int = -1
    relax_collectives_on_preemption: bool = False
    preemption_grace_s: float = 0.0
    progress_timeout_s: float | None = field(default=None, kw_only=True)
    stop_on_repeated_error: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        hint = "0 for none, -1 for any number"
        checks.whole_number("FailureConfig(max_failures)", self.max_failures, least=-1, hint=hint)
        checks.whole_number("FailureConfig(max_preemption_failures)", self.max_preemption_failures, least=-1, hint=hint)
        checks.whole_number(
            "FailureConfig(controller_failure_limit)", self.controller_failure_limit, least=-1, hint=hint
        )
        checks.flag("FailureConfig(relax_collectives_on_preemption)", self.relax_collectives_on_preemption)
        checks.flag("FailureConfig(stop_on_repeated_error)", self.stop_on_repeated_error)
        if self.preemption_grace_s != 0:
            checks.seconds("FailureConfig(preemption_grace_s)", self.preemption_grace_s)
        if self.progress_timeout_s is not None:
            checks.seconds("FailureConfig(progress_timeout_s)", self.progress_timeout_s)
        if not isinstance(self.fail_fast, bool) and self.fail_fast != "raise":
            raise ConfigError(f'FailureConfig(fail_fast) must be True, False or "raise", not {self.fail_fast!r}.')
        if self.fail_fast and self.max_failures != 0:
            raise ConfigError(
                f"FailureConfig(fail_fast={self.fail_fast!r}) allows no retries: set max_failures=0, or drop fail_fast."
            )
        checks.has_no_effect(
            self,
            {
                "fail_fast": "it is a setting for tuning; max_failures=0 says the same of a run.",
                "controller_failure_limit": "a driver that crashed is never counted; calling fit() again continues.",
                "relax_collectives_on_preemption": "a node that is gone ends the group, and the next one starts.",
                "preemption_grace_s": "a node says itself when it goes; see holdfast agent --drain-deadline.",
            },
        )


@dataclass
class CheckpointConfig:
    """Which checkpoints stay: the `num_to_keep` best by `checkpoint_score_attribute` (or the latest), and the latest
    in any case. None keeps all. Nested metrics are named `a/b`.

    `on_conflict` (ours): of a file name that several ranks give to one checkpoint, "lowest_rank" keeps the lowest
    rank's file and warns where bytes differ; "error" ends the run.
    `target_overhead` (ours): the share of the time that checkpoints may keep training waiting where
    `train.should_checkpoint()` decides when to make one.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    checkpoint_frequency: int | None = None
    checkpoint_at_end: bool | None = None
    on_conflict: Literal["lowest_rank", "error"] = field(default="lowest_rank", kw_only=True)
    target_overhead: float = field(default=0.02, kw_only=True)

    def __post_init__(self) -> None:
        keep = self.num_to_keep
        if keep is not None:
            hint = "None keeps all"
            checks.whole_number("CheckpointConfig(num_to_keep)", keep, least=1, hint=hint)
        attribute = self.checkpoint_score_attribute
        if attribute is not None and (not isinstance(attribute, str) or not attribute):
            raise ConfigError(
                f"CheckpointConfig(checkpoint_score_attribute) must be a metric's name, not {attribute!r}."
            )
        checks.one_of("CheckpointConfig(on_conflict)", self.on_conflict, ("lowest_rank", "error"))
        checks.share("CheckpointConfig(target_overhead)", self.target_overhead)
        checks.one_of("CheckpointConfig(checkpoint_score_order)", self.checkpoint_score_order, ("max", "min"))
        own_call = "call train.report(metrics, checkpoint=...) in the training function when you want one."
        checks.has_no_effect(self, {"checkpoint_frequency": own_call, "checkpoint_at_end": own_call})


@dataclass
class SyncConfig:
    """What else goes to storage, from every node. With `sync_artifacts`, the files that workers write to their working
    directory do, at every checkpoint (unless `sync_artifacts_on_checkpoint`, or its older name `sync_on_checkpoint`, is
    False), every `sync_period` seconds, and at the end. Logs are stored every `sync_period` seconds, 30 at most, and at
    the end. What is not done after `sync_timeout` seconds is given up until the next time. Checkpoints are always
    stored, at once.

    `upload_dir` is an older name of `RunConfig(storage_path)`, used where that is not given. `syncer` is accepted for
    old scripts, with a warning that it has no effect.
    """

    sync_period: float = 300
    sync_timeout: float = 1800
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True
    upload_dir: str | os.PathLike[str] | None = None
    syncer: Any = "auto"
    sync_on_checkpoint: bool = True

    def __post_init__(self) -> None:
        checks.seconds("SyncConfig(sync_period)", self.sync_period)
        checks.seconds("SyncConfig(sync_timeout)", self.sync_timeout)
        checks.flag("SyncConfig(sync_artifacts)", self.sync_artifacts)
        checks.flag("SyncConfig(sync_artifacts_on_checkpoint)", self.sync_artifacts_on_checkpoint)
        checks.flag("SyncConfig(sync_on_checkpoint)", self.sync_on_checkpoint)
        checks.storage_path("SyncConfig(upload_dir)", self.storage_path, None)
        checks.has_no_effect(
            self,
            {
                "syncer": "checkpoints are always stored by the node that has them.",
            },
        )

    @property
    def storage_path(self) -> str | os.PathLike[str] | None:
        """Where runs are stored, if it is this that says so."""
        return self.upload_dir


@dataclass
class LoggingConfig:
    """How much Holdfast itself prints and logs: above "INFO" it is warnings and the last line only."""

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not isinstance(self.log_level, str) or not isinstance(logging.getLevelName(self.log_level.upper()), int):
            raise ConfigError(
                f'LoggingConfig(log_level) must be a level of logging, such as "WARNING", not {self.log_level!r}.'
            )
        self.log_level = self.log_level.upper()


@dataclass
class RunConfig:
    """Where a run lies and what it survives. `fit()` with the same `(storage_path, name)` continues the run.

    `name` and `storage_path` are filled in where they are not given. Ours besides Ray's: `resume` says what to do with
    a run of this name that is there already ("auto" continues it, "never" refuses, "must" refuses to start anew,
    "restart" trains from the beginning in the same directory, at every call), `takeover` fences a controller that
    still holds it, `local_dir` is an older name of `storage_path`.

    `verbose=0` shows warnings and the last line only, as HOLDFAST_QUIET=1 and a `logging_config` above "INFO" do.
    The output of each worker is kept in the run's directory in any case, in `logs/`. With `log_to_file=True`, that of
    rank 0 is also appended to files named "stdout" and "stderr" there, over all restarts; a file name, or a pair of
    them, says other ones. They are made of what lies in `logs/`, and are not to be written to.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: object | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: Sequence[Any] | None = None
    worker_runtime_env: Mapping[str, Any] | None = None
    logging_config: LoggingConfig = field(default_factory=LoggingConfig)
    sync_config: SyncConfig = field(default_factory=SyncConfig)
    verbose: int | None = None
    stop: Any = None
    progress_reporter: Any = None
    log_to_file: Any = False
    local_dir: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    resume: Literal["auto", "never", "must", "restart"] = field(default="auto", kw_only=True)
    takeover: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        checks.run_name("RunConfig(name)", self.name)
        checks.storage_path("RunConfig(storage_path)", self.storage_path, self.storage_filesystem)
        checks.storage_path("RunConfig(local_dir)", self.local_dir, None)
        self.failure_config = checks.nested("failure_config", self.failure_config, FailureConfig)
        self.checkpoint_config = checks.nested("checkpoint_config", self.checkpoint_config, CheckpointConfig)
        self.sync_config = checks.nested("sync_config", self.sync_config, SyncConfig)
        self.logging_config = checks.nested("logging_config", self.logging_config, LoggingConfig)
        self.callbacks = self._checked_callbacks()
        checks.one_of("RunConfig(resume)", self.resume, ("auto", "never", "must", "restart"))
        checks.flag("RunConfig(takeover)", self.takeover)
        if self.verbose is not None:
            checks.whole_number("RunConfig(verbose)", self.verbose, least=0)
        checks.runtime_environment("RunConfig(worker_runtime_env)", self.worker_runtime_env)
        no_effect = {
            "progress_reporter": "derive a UserCallback and give it as RunConfig(callbacks).",
            "stop": "it is a setting for tuning; let the training function return when it is done.",
        }
        checks.has_no_effect(self, no_effect)
        checks.output_files("RunConfig(log_to_file)", self.log_to_file)
        if self.name is None:
            self.name = f"holdfast_train_run-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(3)}"
        if self.storage_path is None:
            self.storage_path = self.sync_config.storage_path or self.local_dir or default_storage_path()

    def _checked_callbacks(self) -> list[Any]:
        return checks.callbacks("RunConfig(callbacks)", self.callbacks)

    @property
    def is_quiet(self) -> bool:
        """Whether only warnings and the last line are shown."""
        return self.verbose == 0 or logging.getLevelName(self.logging_config.log_level) > logging.INFO

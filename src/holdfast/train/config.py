"""The settings of a run, with the field names and defaults that users of Ray Train know.

Each is checked when it is made, so that a mistake is one sentence at the user's own line and no worker ever starts on
it. `trainer` brings them together; what depends on the machine (GPUs) or on the function is checked there. The checks
themselves are in `checks`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.core.retention import RetentionRule
from holdfast.errors import ConfigError
from holdfast.train import checks

__all__ = ["CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig", "SyncConfig"]


@dataclass
class ScalingConfig:
    """How many workers, and what each of them gets.

    `num_workers=0` is local mode: the function runs in the calling process, for breakpoints, or in each process
    of torchrun. `trainer_resources`, `placement_strategy`, `accelerator_type` and what follows them mean something to a
    cluster and are kept for it.
    """

    num_workers: int = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    trainer_resources: Mapping[str, float] | None = None
    use_tpu: bool = False
    topology: str | None = None
    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, tuple | list):
            raise ConfigError(
                f"ScalingConfig(num_workers={self.num_workers!r}): a range of workers is not supported yet; "
                f"write one number."
            )
        checks.whole_number("ScalingConfig(num_workers)", self.num_workers, least=0)
        checks.flag("ScalingConfig(use_gpu)", self.use_gpu)
        self._check_resources()
        if self.use_tpu or self.topology is not None:
            raise ConfigError("ScalingConfig(use_tpu, topology): TPUs are not supported; leave both out.")
        checks.one_of(
            "ScalingConfig(placement_strategy)",
            self.placement_strategy,
            ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
        )
        if self.engine not in (None, "local"):
            raise ConfigError(
                f'ScalingConfig(engine={self.engine!r}): only "local" is there; leave it out or write that.'
            )
        on_one_machine = "workers run on this one machine."
        checks.has_no_effect(
            self,
            {
                "placement_strategy": on_one_machine,
                "accelerator_type": on_one_machine,
                "label_selector": on_one_machine,
                "trainer_resources": "the driver reserves nothing for itself.",
            },
        )

    def _check_resources(self) -> None:
        resources = checks.resources("ScalingConfig(resources_per_worker)", self.resources_per_worker)
        checks.resources("ScalingConfig(trainer_resources)", self.trainer_resources)
        gpus = resources.get("GPU")
        if gpus and not self.use_gpu:
            raise ConfigError(
                f"ScalingConfig(resources_per_worker) asks for {gpus:g} GPU but use_gpu is False: set use_gpu=True."
            )
        if gpus == 0 and self.use_gpu:
            raise ConfigError(
                'ScalingConfig(use_gpu=True) and resources_per_worker["GPU"] of 0 contradict each other: drop one.'
            )

    @property
    def worker_resources(self) -> dict[str, float]:
        """What one worker gets: a CPU, and a GPU with `use_gpu`, unless something else was asked for."""
        resources = dict(self.resources_per_worker or {})
        if self.use_gpu:
            resources.setdefault("GPU", 1)
        if not resources:
            resources["CPU"] = 1
        return resources

    @property
    def total_resources(self) -> dict[str, float]:
        """What all workers get together."""
        return {name: amount * max(1, self.num_workers) for name, amount in self.worker_resources.items()}


@dataclass
class FailureConfig:
    """What a run survives. Crashes of the driver, and interrupts, never count.

    `max_failures`: failures of workers that are survived; 0 is none, -1 any number. `fail_fast` insists on none.
    `progress_timeout_s` (ours): a group that reports nothing for so long is taken for hung and is replaced.
    """

    max_failures: int = 0
    max_preemption_failures: int = -1
    progress_timeout_s: float | None = None
    fail_fast: bool | str = False
    controller_failure_limit: int = -1

    def __post_init__(self) -> None:
        hint = "0 for none, -1 for any number"
        checks.whole_number("FailureConfig(max_failures)", self.max_failures, least=-1, hint=hint)
        checks.whole_number("FailureConfig(max_preemption_failures)", self.max_preemption_failures, least=-1, hint=hint)
        checks.whole_number(
            "FailureConfig(controller_failure_limit)", self.controller_failure_limit, least=-1, hint=hint
        )
        if self.progress_timeout_s is not None:
            checks.seconds("FailureConfig(progress_timeout_s)", self.progress_timeout_s)
        if self.fail_fast not in (True, False, "raise"):
            raise ConfigError(f'FailureConfig(fail_fast) must be a bool or "raise", not {self.fail_fast!r}.')
        if self.fail_fast and self.max_failures != 0:
            raise ConfigError(
                f"FailureConfig(fail_fast={self.fail_fast!r}) allows no retries: set max_failures=0, or drop fail_fast."
            )
        checks.has_no_effect(
            self,
            {
                "max_preemption_failures": "preemptions are not told from other failures yet, so max_failures counts.",
                "controller_failure_limit": "a driver that crashed is never counted; calling fit() again continues.",
            },
        )


@dataclass
class CheckpointConfig:
    """Which checkpoints stay: the `num_to_keep` best by `checkpoint_score_attribute` (or the latest), and the latest
    in any case. None keeps all. Nested metrics are named `a/b`.

    `target_overhead` (ours): the share of the time that checkpoints may keep training waiting where
    `train.should_checkpoint()` decides when to make one.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    checkpoint_frequency: int | None = 0
    checkpoint_at_end: bool | None = None
    target_overhead: float = 0.02

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
        checks.share("CheckpointConfig(target_overhead)", self.target_overhead)
        checks.one_of("CheckpointConfig(checkpoint_score_order)", self.checkpoint_score_order, ("max", "min"))
        if self.checkpoint_frequency:
            raise ConfigError(
                "CheckpointConfig(checkpoint_frequency) does nothing for a training function: call "
                "train.report(metrics, checkpoint=...) as often as you want one."
            )
        if self.checkpoint_at_end:
            raise ConfigError(
                "CheckpointConfig(checkpoint_at_end) does nothing for a training function: call "
                "train.report(metrics, checkpoint=...) before it returns."
            )

    @property
    def rule(self) -> RetentionRule:
        """The same, as retention knows it."""
        return RetentionRule(self.num_to_keep, self.checkpoint_score_attribute, self.checkpoint_score_order)


@dataclass
class SyncConfig:
    """What else goes to storage. With `sync_artifacts`, the files that workers write to their working directory do, at
    every checkpoint (unless `sync_artifacts_on_checkpoint` is False), every `sync_period` seconds, and at the end.

    `upload_dir` is an older name of `RunConfig(storage_path)`, used where that is not given. `sync_timeout`,
    `sync_on_checkpoint` and `syncer` are accepted for old scripts, with a warning that they have no effect.
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
        checks.storage_path("SyncConfig(upload_dir)", self.upload_dir, None)
        checks.has_no_effect(
            self,
            {
                "sync_timeout": "set HOLDFAST_STORAGE_PATIENCE_S to say how long storage may fail.",
                "sync_on_checkpoint": "checkpoints are always stored.",
                "syncer": "checkpoints are always stored by the node that has them.",
            },
        )


@dataclass
class RunConfig:
    """Where a run lies and what it survives. `fit()` with the same `(storage_path, name)` continues the run.

    Ours besides Ray's: `resume` says what to do with a run of this name that is there already ("auto" continues it,
    "never" refuses, "must" refuses to start anew, "restart" trains from the beginning in the same directory, at every
    call), `takeover` fences a controller that still holds it.

    `verbose=0` shows warnings and the last line only, as HOLDFAST_QUIET=1 does. `log_to_file=True` asks for what is
    always done: the output of workers is kept in the run's directory.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: object | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    sync_config: SyncConfig = field(default_factory=SyncConfig)
    callbacks: Sequence[Any] | None = None
    verbose: int | None = None
    stop: Any = None
    progress_reporter: Any = None
    log_to_file: Any = False
    local_dir: str | os.PathLike[str] | None = None
    worker_runtime_env: Mapping[str, Any] | None = None
    resume: Literal["auto", "never", "must", "restart"] = "auto"
    takeover: bool = False

    def __post_init__(self) -> None:
        checks.run_name("RunConfig(name)", self.name)
        checks.storage_path("RunConfig(storage_path)", self.storage_path, self.storage_filesystem)
        checks.storage_path("RunConfig(local_dir)", self.local_dir, None)
        self.failure_config = checks.nested("failure_config", self.failure_config, FailureConfig)
        self.checkpoint_config = checks.nested("checkpoint_config", self.checkpoint_config, CheckpointConfig)
        self.sync_config = checks.nested("sync_config", self.sync_config, SyncConfig)
        self.callbacks = checks.callbacks("RunConfig(callbacks)", self.callbacks)
        checks.one_of("RunConfig(resume)", self.resume, ("auto", "never", "must", "restart"))
        checks.flag("RunConfig(takeover)", self.takeover)
        if self.verbose is not None:
            checks.whole_number("RunConfig(verbose)", self.verbose, least=0)
        checks.has_no_effect(self, {"progress_reporter": "derive a UserCallback and give it as RunConfig(callbacks)."})
        if not isinstance(self.log_to_file, bool | None):
            checks.has_no_effect(self, {"log_to_file": "output is always kept, in logs/generation_*/rank_*.log."})
        if self.stop is not None:
            raise ConfigError("RunConfig(stop) is for tuning: let the training function return when it is done.")
        checks.runtime_environment("RunConfig(worker_runtime_env)", self.worker_runtime_env)

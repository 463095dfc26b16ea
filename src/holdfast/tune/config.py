"""The configurations of tuning: those of training, with the settings that only tuning knows, and `TuneConfig`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from holdfast.errors import ConfigError
from holdfast.train import checks
from holdfast.train import config as train_config
from holdfast.train.callbacks import UserCallback
from holdfast.train.config import PlacementGroupFactory
from holdfast.tune.callback import Callback
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.objective import check_metric, check_mode
from holdfast.tune.progress_reporter import ProgressReporter
from holdfast.tune.schedulers.trial_scheduler import TrialScheduler
from holdfast.tune.search.searcher import Searcher
from holdfast.tune.stopper.resolve import make_stopper
from holdfast.tune.syncer import SyncConfig

__all__ = ["CheckpointConfig", "FailureConfig", "PlacementGroupFactory", "RunConfig", "TuneConfig", "check_supported"]


@dataclass
class FailureConfig(train_config.FailureConfig):
    """What each trial survives: `max_failures` as in training. With `fail_fast`, the first trial that fails stops the
    experiment, and "raise" has `fit()` raise its error as well; the same call goes on with the others."""

    _effective: ClassVar[frozenset[str]] = frozenset({"fail_fast"})


@dataclass
class CheckpointConfig(train_config.CheckpointConfig):
    """Which checkpoints of each trial stay. For class trainables, `checkpoint_frequency` is after how many steps one is
    made, and `checkpoint_at_end` has one made at the end as well."""

    _effective: ClassVar[frozenset[str]] = frozenset({"checkpoint_frequency", "checkpoint_at_end"})


@dataclass(init=False)
class RunConfig(train_config.RunConfig):
    """Where an experiment lies, what its trials survive, and when they `stop`: a dict of metrics and the values at
    which a trial has gone on long enough, a function of trial id and result, or a `Stopper`.

    `callbacks` are `Callback` objects. `progress_reporter` chooses what the terminal shows (`CLIReporter`), or shows it
    itself. `verbose=0` and HOLDFAST_QUIET=1 leave warnings and the last line, HOLDFAST_JSON=1 prints records as JSON.
    """

    _effective: ClassVar[frozenset[str]] = frozenset({"stop", "progress_reporter"})

    def __init__(  # the order is Ray Tune's, which is another than Ray Train's
        self,
        name: str | None = None,
        storage_path: str | os.PathLike[str] | None = None,
        storage_filesystem: object | None = None,
        failure_config: train_config.FailureConfig | None = None,
        checkpoint_config: train_config.CheckpointConfig | None = None,
        sync_config: train_config.SyncConfig | None = None,
        verbose: int | None = None,
        stop: Any = None,
        callbacks: Sequence[Callback] | None = None,
        progress_reporter: ProgressReporter | None = None,
        log_to_file: Any = False,
        local_dir: str | os.PathLike[str] | None = None,
        **others: Any,
    ) -> None:
        """`others` are `resume`, `takeover`, `logging_config` and `worker_runtime_env`, as of `train.RunConfig`."""
        super().__init__(
            name=name,
            storage_path=storage_path,
            storage_filesystem=storage_filesystem,
            failure_config=FailureConfig() if failure_config is None else failure_config,
            checkpoint_config=CheckpointConfig() if checkpoint_config is None else checkpoint_config,
            sync_config=SyncConfig() if sync_config is None else sync_config,
            verbose=verbose,
            stop=stop,
            callbacks=callbacks,
            progress_reporter=progress_reporter,
            log_to_file=log_to_file,
            local_dir=local_dir,
            **others,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        make_stopper(self.stop)  # refuses what is none
        if not isinstance(self.progress_reporter, ProgressReporter | None):
            raise ConfigError(
                f"RunConfig(progress_reporter) must be a CLIReporter or another ProgressReporter, not "
                f"{self.progress_reporter!r}."
            )

    def _checked_callbacks(self) -> list[Any]:
        # A trainer takes this configuration as well, with callbacks of its own kind.
        given = self.callbacks
        if isinstance(given, Sequence) and all(isinstance(one, Callback | UserCallback) for one in given):
            return list(given)
        return checks.callbacks("RunConfig(callbacks)", given, Callback, "holdfast.tune.Callback")


@dataclass
class TuneConfig:
    """How the search goes: `num_samples` draws from the space (-1: without end), at most `max_concurrent_trials` at a
    time (as many as the machine has CPUs and GPUs for, if None), for at most `time_budget_s` seconds.

    `metric` and `mode` ("min" or "max") say which trial is better. `reuse_actors` has no effect: each trial is a
    process of its own, forked from one that has opened the trainable and what `tune.with_parameters` gave it.

    `budget` (ours) names the parameter that says how long a trial goes on, such as "epochs": a trial that differs from
    one that has ended in that parameter alone, and is longer, starts from its checkpoint.
    """

    mode: str | None = None
    metric: str | None = None
    search_alg: Searcher | None = None
    scheduler: TrialScheduler | None = None
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    time_budget_s: float | timedelta | None = None
    reuse_actors: bool = False
    trial_name_creator: Callable[[Trial], str] | None = None
    trial_dirname_creator: Callable[[Trial], str] | None = None
    chdir_to_trial_dir: Any = None
    budget: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_mode("TuneConfig(mode)", self.mode, optional=True)
        check_metric("TuneConfig(metric)", self.metric, optional=True)
        if self.search_alg is not None and not isinstance(self.search_alg, Searcher):
            raise ConfigError(f"TuneConfig(search_alg) must be a Searcher, not {self.search_alg!r}.")
        if self.scheduler is not None and not isinstance(self.scheduler, TrialScheduler):
            raise ConfigError(f"TuneConfig(scheduler) must be a TrialScheduler, not {self.scheduler!r}.")
        hint = "-1 for any number"
        checks.whole_number("TuneConfig(num_samples)", self.num_samples, least=-1, hint=hint)
        if self.max_concurrent_trials is not None:
            checks.whole_number("TuneConfig(max_concurrent_trials)", self.max_concurrent_trials, least=0)
        if isinstance(self.time_budget_s, timedelta):
            self.time_budget_s = self.time_budget_s.total_seconds()
        if self.time_budget_s is not None:
            checks.seconds("TuneConfig(time_budget_s)", self.time_budget_s)
        if self.num_samples == 0:
            raise ConfigError("TuneConfig(num_samples=0) would try nothing: set 1 or more, or -1 for any number.")
        check_metric("TuneConfig(budget)", self.budget, optional=True)
        checks.has_no_effect(
            self,
            {
                "chdir_to_trial_dir": "set HOLDFAST_CHDIR_TO_TRIAL_DIR=0 to leave workers where the driver is.",
                "reuse_actors": "each trial is a process of its own, whose setup() is called; give it what takes long "
                "to load with tune.with_parameters(trainable, data=...), which is opened once for a node's trials.",
            },
        )


def check_supported(tune_config: TuneConfig, run_config: train_config.RunConfig | None) -> None:
    """Refuse, before anything starts, what experiments cannot do yet."""
    if run_config is not None:
        checks.callbacks("RunConfig(callbacks)", run_config.callbacks, Callback, "holdfast.tune.Callback")

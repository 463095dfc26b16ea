"""`tune.run`: a `Tuner` for scripts that were written before there was one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError, TuneError
from holdfast.storage.locate import open_store
from holdfast.train import checks
from holdfast.tune.analysis.experiment_analysis import ExperimentAnalysis
from holdfast.tune.config import CheckpointConfig, FailureConfig, RunConfig, TuneConfig
from holdfast.tune.experiment.experiment import Experiment
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.registry import find_trainable
from holdfast.tune.resume_config import ResumeConfig
from holdfast.tune.schedulers.create import create_scheduler
from holdfast.tune.schedulers.trial_scheduler import TrialScheduler
from holdfast.tune.search.create import create_searcher
from holdfast.tune.search.searcher import Searcher
from holdfast.tune.syncer import SyncConfig
from holdfast.tune.trainable import with_resources
from holdfast.tune.tuner import Tuner, default_name

__all__ = ["run", "run_experiments"]

_RESUME = re.compile(
    r"(auto|local|remote|prompt|errored_only|restart_errored_only)(\+(errored(_only)?|restart_errored(_only)?))?"
)


def run(
    run_or_experiment: Any,
    *,
    name: str | None = None,
    metric: str | None = None,
    mode: str | None = None,
    stop: Any = None,
    time_budget_s: float | timedelta | None = None,
    config: Mapping[str, Any] | None = None,
    resources_per_trial: Any = None,
    num_samples: int = 1,
    storage_path: str | os.PathLike[str] | None = None,
    storage_filesystem: object | None = None,
    search_alg: Searcher | str | None = None,
    scheduler: TrialScheduler | str | None = None,
    checkpoint_config: CheckpointConfig | None = None,
    verbose: int | None = None,
    progress_reporter: Any = None,
    log_to_file: Any = False,
    trial_name_creator: Callable[[Trial], str] | None = None,
    trial_dirname_creator: Callable[[Trial], str] | None = None,
    sync_config: SyncConfig | None = None,
    export_formats: Sequence[str] | None = None,
    max_failures: int = 0,
    fail_fast: bool = False,
    restore: str | None = None,
    resume: bool | str | None = None,
    resume_config: ResumeConfig | None = None,
    reuse_actors: bool = False,
    raise_on_failed_trial: bool = True,
    callbacks: Sequence[Any] | None = None,
    max_concurrent_trials: int | None = None,
    keep_checkpoints_num: int | None = None,
    checkpoint_score_attr: str | None = None,
    checkpoint_freq: int = 0,
    checkpoint_at_end: bool = False,
    chdir_to_trial_dir: Any = None,
    local_dir: str | os.PathLike[str] | None = None,
) -> ExperimentAnalysis:
    """Try configurations drawn from `config`: `Tuner(...).fit()`, with everything in one call.

    The arguments are those of `Tuner`, `TuneConfig`, `RunConfig`, `FailureConfig` and `CheckpointConfig`. As with a
    `Tuner`, the same `name` and `storage_path` continue an experiment. `resume=True` refuses to begin a new one;
    `restore` is the path of a checkpoint from which each trial starts that has none of its own.
    "AUTO+ERRORED" and "AUTO+RESTART_ERRORED" run failed trials again, as `resume_config` can say as well. Raises
    `TuneError` if trials failed, unless `raise_on_failed_trial` is False.
    """
    if isinstance(run_or_experiment, Experiment):
        return run(run_or_experiment.run, **{"name": run_or_experiment.name, **run_or_experiment.settings})
    if export_formats:
        checks.warn_of_no_effect("tune.run(export_formats)", "save what you need in a checkpoint.", stacklevel=3)
    trainable = find_trainable(run_or_experiment)
    if resources_per_trial is not None:
        trainable = with_resources(trainable, resources_per_trial)
    kept = checkpoint_config or _checkpoint_config(
        keep_checkpoints_num, checkpoint_score_attr, checkpoint_freq, checkpoint_at_end
    )
    tuner = Tuner(
        trainable,
        param_space=config,
        tune_config=TuneConfig(
            mode=mode,
            metric=metric,
            search_alg=create_searcher(search_alg) if isinstance(search_alg, str) else search_alg,
            scheduler=create_scheduler(scheduler) if isinstance(scheduler, str) else scheduler,
            num_samples=num_samples,
            max_concurrent_trials=max_concurrent_trials,
            time_budget_s=time_budget_s,
            reuse_actors=reuse_actors,
            trial_name_creator=trial_name_creator,
            trial_dirname_creator=trial_dirname_creator,
            chdir_to_trial_dir=chdir_to_trial_dir,
        ),
        run_config=RunConfig(
            name=name or default_name(trainable),
            storage_path=storage_path,
            storage_filesystem=storage_filesystem,
            failure_config=FailureConfig(max_failures=max_failures, fail_fast=fail_fast),
            checkpoint_config=kept,
            callbacks=callbacks,
            sync_config=sync_config or SyncConfig(),
            verbose=verbose,
            stop=stop,
            progress_reporter=progress_reporter,
            log_to_file=log_to_file,
            local_dir=local_dir,
        ),
    )
    _apply_resume(tuner, resume, resume_config)
    if restore is not None:
        tuner._initial_checkpoint = _existing(restore, storage_filesystem)
    results = tuner.fit()
    analysis = ExperimentAnalysis._of_results(results, metric, mode)
    failed = [trial.trial_id for trial in analysis.trials if trial.status == Trial.ERROR]
    if failed and raise_on_failed_trial:
        first = str(next(iter(results.errors), ""))
        raise TuneError(
            f"{len(failed)} of {len(analysis.trials)} trials failed ({', '.join(failed[:10])}), the first with: "
            f"{first} The results are in {analysis.experiment_path}; raise_on_failed_trial=False returns them."
        )
    return analysis


def run_experiments(
    experiments: Any,
    scheduler: TrialScheduler | None = None,
    verbose: int | None = None,
    progress_reporter: Any = None,
    resume: bool | str | None = None,
    resume_config: ResumeConfig | None = None,
    reuse_actors: bool = False,
    raise_on_failed_trial: bool = True,
    concurrent: bool = True,
    callbacks: Sequence[Any] | None = None,
) -> list[Trial]:
    """Run several experiments, one after the other; returns all their trials. `experiments` are `Experiment` objects,
    or dicts of their settings by name."""
    found: list[Experiment] = []
    for one in experiments if isinstance(experiments, list | tuple) else [experiments]:
        if isinstance(one, Mapping):
            found += [Experiment.from_json(name, spec) for name, spec in one.items()]
        else:
            found.append(one)
    shared = {
        "scheduler": scheduler,
        "verbose": verbose,
        "progress_reporter": progress_reporter,
        "resume": resume,
        "resume_config": resume_config,
        "reuse_actors": reuse_actors,
        "raise_on_failed_trial": raise_on_failed_trial,
        "callbacks": callbacks,
    }
    trials: list[Trial] = []
    for experiment in found:
        settings = {**shared, **experiment.settings}
        trials += run(experiment.run, **{"name": experiment.name, **settings}).trials
    return trials


def _existing(path: str, filesystem: object | None) -> Checkpoint:
    """The checkpoint at this path, or one sentence."""
    store = open_store(path, filesystem)
    try:
        if not store.list():
            raise ConfigError(f"tune.run(restore) must be the path of a checkpoint; there is nothing in {store.uri}.")
    finally:
        store.close()
    return Checkpoint(path, filesystem)


def _checkpoint_config(keep: int | None, score: str | None, frequency: int, at_end: bool) -> CheckpointConfig:
    """From the older arguments; a score whose name begins with "min-" is better the lower it is."""
    order = "min" if score is not None and score.startswith("min-") else "max"
    return CheckpointConfig(
        num_to_keep=keep,
        checkpoint_score_attribute=score.removeprefix("min-") if score is not None else None,
        checkpoint_score_order="min" if order == "min" else "max",
        checkpoint_frequency=frequency or None,
        checkpoint_at_end=at_end or None,
    )


def _apply_resume(tuner: Tuner, resume: bool | str | None, resume_config: ResumeConfig | None) -> None:
    if resume_config is not None:
        kinds, errored = ResumeConfig.ResumeType, resume_config.errored
        unfinished = resume_config.unfinished is kinds.RESUME
        tuner._resume(unfinished, errored is kinds.RESUME, errored is kinds.RESTART)
    if not isinstance(resume, str):
        tuner._must_exist = bool(resume)
        return
    words = resume.lower()
    if _RESUME.fullmatch(words) is None:
        raise ConfigError(f'tune.run(resume) must be True, False, "AUTO" or "AUTO+ERRORED", not {resume!r}.')
    tuner._must_exist = not words.startswith(("auto", "prompt"))
    restart = "restart_errored" in words
    tuner._resume(not words.endswith("_only"), "errored" in words and not restart, restart)

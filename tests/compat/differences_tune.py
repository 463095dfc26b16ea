"""Every deliberate difference between Holdfast's public names and Ray Tune's (2.60), with its reason.

`test_surface` holds the keys to what an installed Ray has, `page` makes docs/migrating-tune.md from them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.compat import differences

__all__ = ["BEHAVIOUR", "INTEGRATIONS", "MISSING", "MISSING_INTEGRATIONS", "MODULES", "OTHER_DEFAULTS", "OURS"]

MODULES: dict[str, tuple[str, ...]] = {
    "tune": (),
    "tune.syncer": ("SyncConfig",),
    "tune.context": ("TuneContext", "get_context"),
    "tune.analysis": (),
    "tune.error": ("TuneError",),
    "tune.registry": ("register_trainable",),
    "tune.progress_reporter": ("CLIReporter", "JupyterNotebookReporter", "ProgressReporter"),
    "air": (),
    "air.config": ("CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig"),
    "air.result": ("Result",),
    "air.session": (
        *("get_checkpoint", "get_dataset_shard", "get_experiment_name", "get_local_rank", "get_local_world_size"),
        *("get_node_rank", "get_trial_dir", "get_trial_id", "get_trial_name", "get_trial_resources"),
        *("get_world_rank", "get_world_size", "report"),
    ),
    "tune.search": (),
    "tune.search.optuna": (),
    "tune.search.repeater": ("TRIAL_INDEX",),
    "tune.schedulers": (),
    "tune.stopper": (),
    "tune.logger": (),
    "tune.callback": ("Callback",),
    "tune.integration.ray_train": ("CHECKPOINT_PATH_KEY", "TuneReportCallback"),
}
"""What is compared; where Ray has no `__all__`, these names."""

INTEGRATIONS = {
    "tune.integration.pytorch_lightning": ("TuneCallback", "TuneReportCallback", "TuneReportCheckpointCallback"),
    "tune.integration.xgboost": ("TuneReportCallback", "TuneReportCheckpointCallback"),
    "tune.integration.lightgbm": ("TuneReportCallback", "TuneReportCheckpointCallback"),
}
"""What is compared where the frameworks are installed (`tests/frameworks/test_names.py`)."""


def _each(classes: Iterable[str], attributes: Iterable[str], reason: str) -> dict[str, str]:
    return {f"tune.{kind}.{attribute}": reason for kind in classes for attribute in attributes}


_SCHEDULERS = (
    *("ASHAScheduler", "AsyncHyperBandScheduler", "FIFOScheduler", "HyperBandScheduler", "MedianStoppingRule"),
    *("PopulationBasedTraining", "TrialScheduler"),
)
_SEARCHERS = ("search.Searcher", "search.ConcurrencyLimiter", "search.Repeater", "search.optuna.OptunaSearch")
_JOURNAL = (
    "the journal has what happened, and it is repeated to a searcher that is made again; there are no state files"
)

_REPORTERS = (
    *("CLIReporter", "JupyterNotebookReporter"),
    *("progress_reporter.CLIReporter", "progress_reporter.JupyterNotebookReporter"),
)
_NOT_IN_AIR = ("AcquiredResources", "DataBatchType", "ResourceRequest")

MISSING = {
    **_each(_SEARCHERS, ("CKPT_FILE_TMPL", "save_to_dir", "restore_from_dir"), _JOURNAL),
    **_each(
        ["search.BasicVariantGenerator"],
        ("CKPT_FILE_TMPL", "has_checkpoint", "save_to_dir", "restore_from_dir"),
        _JOURNAL,
    ),
    **_each(_SEARCHERS, ("add_evaluated_trials",), "`add_evaluated_point` takes one at a time"),
    **_each(
        ["search.BasicVariantGenerator"],
        ("add_configurations", "is_finished", "next_trial", "set_finished"),
        "it is a `Searcher` like any other: `suggest`",
    ),
    "tune.search.SearchAlgorithm": "there is one kind of searcher: `Searcher`",
    "tune.search.SearchGenerator": "there is one kind of searcher: `Searcher`",
    **_each(
        ["search"],
        ("UNDEFINED_METRIC_MODE", "UNDEFINED_SEARCH_SPACE", "UNRESOLVED_SEARCH_SPACE"),
        "texts of Ray's errors",
    ),
    "tune.search.optuna.OptunaSearch.convert_search_space": "spaces are asked for parameter by parameter",
    **_each(
        [f"schedulers.{name}" for name in _SCHEDULERS],
        ("supports_buffered_results",),
        "every result is decided on as it comes",
    ),
    "tune.schedulers.HyperBandForBOHB": "needs a searcher that is not here; `HyperBandScheduler` goes with any",
    "tune.schedulers.PopulationBasedTraining.last_scores": "internal to Ray",
    "tune.schedulers.PopulationBasedTraining.reset_stats": "internal to Ray",
    "tune.schedulers.PopulationBasedTrainingReplay": "not there yet",
    "tune.schedulers.ResourceChangingScheduler": "a trial's resources are fixed",
    "tune.logger.JsonLoggerCallback.update_config": "params.json is written in any case",
    "tune.logger.TBXLoggerCallback.VALID_HPARAMS": "internal to Ray",
    "tune.logger.TBXLoggerCallback.VALID_NP_HPARAMS": "internal to Ray",
    "tune.logger.pretty_print": "use `json.dumps` or `pprint`",
    "tune.ResultGrid(experiment_analysis)": "made by Holdfast, not by scripts",
    "tune.register_env": "belongs to RLlib",
    **_each(_REPORTERS, ("DEFAULT_COLUMNS", "VALID_SUMMARY_TYPES"), "internal to Ray"),
    **_each(_REPORTERS, ("set_search_properties", "set_start_time", "set_total_samples"), "`setup` says all of it"),
    **_each(
        [name for name in _REPORTERS if "Jupyter" in name],
        ("display", "output_queue"),
        "the table is text, in notebooks as elsewhere",
    ),
    **_each(
        ["Experiment"],
        ("PUBLIC_KEYS", "checkpoint_config", "checkpoint_dir", "get_trainable_name", "local_dir", "local_path"),
        "it only holds arguments of `tune.run`",
    ),
    **_each(
        ["Experiment"],
        ("path", "public_spec", "register_if_needed", "remote_path", "run_identifier", "stopper"),
        "it only holds arguments of `tune.run`",
    ),
    **_each(
        ["PlacementGroupFactory"],
        ("head_bundle_is_empty", "head_cpus", "to_placement_group"),
        "there are no placement groups; it says what a trial takes",
    ),
    **_each(
        ["Trainable"],
        ("get_auto_filled_metrics", "get_current_ip_pid", "get_state", "is_actor", "log_result", "train_buffered"),
        "internal to Ray",
    ),
    **_each(
        ["Trainable"],
        ("export_model", "reset", "restore", "save", "stop", "train"),
        "Holdfast drives it; override `setup`, `step`, `save_checkpoint`, `load_checkpoint` and `cleanup`",
    ),
    **_each(["Trainable"], ("default_resource_request", "resource_help"), "use `tune.with_resources`"),
    **_each(["Trainable"], ("iteration",), "it is there, as an attribute of each object"),
    "tune.Tuner.restore(_resume_config)": "internal to Ray",
    **{f"tune.Tuner({name})": "internal to Ray" for name in ("_entrypoint", "_tuner_internal", "_tuner_kwargs")},
    **{f"tune.run({name})": "internal to Ray" for name in ("_entrypoint", "_remote", "_remote_string_queue")},
    "tune.run_experiments(_remote)": "internal to Ray",
    **{
        f"{module}.CheckpointConfig({name})": "internal to Ray"
        for module in ("tune", "air", "air.config")
        for name in ("_checkpoint_keep_all_ranks", "_checkpoint_upload_from_workers")
    },
    **{f"air.{name}": "of Ray Data, or internal to Ray" for name in _NOT_IN_AIR},
    **{
        f"{module}.ScalingConfig.from_placement_group_factory": "there are no placement groups"
        for module in ("air", "air.config")
    },
}
"""What Ray has and Holdfast does not."""

MISSING_INTEGRATIONS = {
    "tune.integration.keras": "there is no Keras here",
    "tune.integration.lightgbm.TuneReportCallback": "Ray refuses it as well: use `TuneReportCheckpointCallback`",
    "tune.integration.xgboost.TuneReportCallback": "Ray refuses it as well: use `TuneReportCheckpointCallback`",
}
"""The same, of `INTEGRATIONS`."""

_ELASTIC = ("elastic", "global_batch_size", "rng_state")

OTHER_DEFAULTS = {
    **{
        f"tune.{name}(base)": "has no effect in either"
        for name in ("lograndint", "loguniform", "qlograndint", "qloguniform")
    },
    **{
        f"{module}.CheckpointConfig(checkpoint_frequency)": "None is 0: never, but for what the function reports"
        for module in ("tune", "air", "air.config")
    },
    "tune.Tuner.restore(trainable)": "a trainable that can be imported need not be given again",
}
"""Parameters whose default is another than Ray's."""

OURS = {
    **{
        f"tune.ResultGrid({name})": "made by Holdfast, not by scripts"
        for name in ("experiment_path", "filesystem", "metric", "mode", "open_result", "read_history", "trials")
    },
    **{
        f"{module}.{name}": reason
        for module in ("tune", "air", "air.config")
        for name, reason in {
            "CheckpointConfig(on_conflict)": "which of two equally named files of two ranks is kept",
            "CheckpointConfig(target_overhead)": "how often `train.should_checkpoint()` says yes",
            "FailureConfig(controller_failure_limit)": "as `train.FailureConfig` has it",
            "FailureConfig(max_preemption_failures)": "as `train.FailureConfig` has it",
            "FailureConfig(preemption_grace_s)": "as `train.FailureConfig` has it",
            "FailureConfig(progress_timeout_s)": "replaces workers that hang",
            "FailureConfig(relax_collectives_on_preemption)": "as `train.FailureConfig` has it",
            "FailureConfig(stop_on_repeated_error)": "a trial that fails twice in the same way has failed",
        }.items()
    },
    **{
        f"air{module}.ScalingConfig({name})": "as `train.ScalingConfig` has it"
        for module in ("", ".config")
        for name in ("elastic_resize_monitor_interval_s", "label_selector", "topology", "use_tpu")
    },
    **{
        name.replace("train.", f"air{module}.", 1): "as `train.ScalingConfig` has it"
        for module in ("", ".config")
        for name in differences.OURS
        if name.startswith("train.ScalingConfig(")
    },
    **{f"air.session.get_dataset_shard({name})": "as `train` has it" for name in _ELASTIC},
    **{f"{name}.Result(return_value)": "as `train.Result` has it" for name in ("tune", "air", "air.result")},
    "tune.TuneConfig(budget)": "the parameter that says how long a trial is; a longer version starts from its end",
    "air.Checkpoint": "Ray had it here before; with `from_dict` and `to_dict`, which do not pickle",
    "air.session": "Ray has it too, though not in the list of its names",
    **{
        f"tune{module}.SyncConfig({name})": "of older versions of Ray: where to, and a `Syncer` of your own"
        for module in ("", ".syncer")
        for name in ("sync_on_checkpoint", "syncer", "upload_dir")
    },
    **{
        f"tune{module}.TuneContext({name})": "made by Holdfast, not by scripts"
        for module in ("", ".context")
        for name in ("assignment", "filesystem", "metadata")
    },
    "tune.schedulers.create_scheduler": "as `tune.create_scheduler`",
    "tune.search.create_searcher": "as `tune.create_searcher`",
    "tune.stopper.DictStopper": "what `RunConfig(stop={...})` becomes",
}
"""What Holdfast has and Ray does not."""

BEHAVIOUR = (
    (
        "Random values",
        "drawn one after the other from numpy's generator",
        "each depends on the seed and the trial's number alone, so a trial that is added or repeated changes no other; "
        "other values than Ray's for the same seed",
    ),
    (
        "What a restart needs",
        "searcher, scheduler and space are pickled",
        "they are stored as names and JSON arguments and told again what happened; a lambda, an object, or a function "
        "of the main script is asked for",
    ),
    ("Not-a-number as a metric", "`ASHAScheduler` lets the trial go on", "ranks worst everywhere"),
    (
        "`PopulationBasedTraining`: bounds",
        "a mutated value may leave its domain",
        "a mutated value stays within its domain",
    ),
    (
        "`PopulationBasedTraining`: `tune.choice`",
        "treated as a number; an error for strings",
        "gives way to a neighbour, as an entry of a list does",
    ),
    (
        "`PopulationBasedTraining`: a donor's checkpoint",
        "may have been deleted by `num_to_keep`",
        "pinned from when its trial was judged",
    ),
    (
        "`MedianStoppingRule(min_time_slice=0)`",
        "pauses trials at each report for those that wait, until there is enough to compare",
        "pauses none; give a time slice to have trials take turns",
    ),
    (
        "`HyperBandScheduler`: the first bracket",
        "the one whose trials run to `max_t`",
        "the one with the most trials and the first milestone, as in the paper",
    ),
    (
        "`OptunaSearch` and `tune.randn`, `qrandn`, `qloguniform`, `qlograndint`, `sample_from`",
        "refused, or not quantized",
        "searched as they are; domains inside of a choice's values as well",
    ),
    (
        "`OptunaSearch(seed)` with a `sampler`",
        "has no effect",
        "seeds the sampler; the experiment's seed does if there is none",
    ),
    ("`OptunaSearch(storage)`", "keeps the trials there", "has no effect: the experiment's journal keeps them"),
    (
        "`FailureConfig(fail_fast)`",
        "trials that were stopped because another failed have ended",
        "the same call goes on with them, from their checkpoints",
    ),
    (
        "`TuneConfig(time_budget_s)` on restore",
        "has ended the trials",
        "of all calls together; more time lets the trials go on that it stopped",
    ),
    (
        "`RunConfig(log_to_file)` of a trainer's trials",
        "the output of the trial's driver",
        "the output of rank 0; that of every worker is in the trial's `logs/` in any case",
    ),
    ("`RunConfig(stop=[...])`", "a list of stoppers", "a list of stoppers, dicts and functions"),
    (
        "`MaximumIterationStopper` after a trial's failure",
        "counts repeated reports again",
        "compares `training_iteration`",
    ),
    (
        "`JsonLoggerCallback`, `CSVLoggerCallback`, `TBXLoggerCallback`",
        "write the files",
        "accepted; the files are written in any case",
    ),
    (
        "`tune.run(name=...)` of an experiment that is there",
        "begins a new one in the same directory, unless `resume` is set",
        "continues it, as `Tuner` does; `resume=True` refuses to begin a new one",
    ),
    (
        "`tune.report` where a scheduler or `stop` may end the trial",
        "returns at once; the trial is killed some reports later",
        "waits for the decision, and does not return if the trial has to end",
    ),
    (
        "A trainer's `fit()` in a trial",
        "its workers take resources of the cluster besides the trial's",
        "its workers are on the machine of the trial's, and end with it; what they need is asked for with the trial "
        "(`tune.with_resources`)",
    ),
    (
        "`TuneReportCallback` of `tune.integration.ray_train`",
        "reports again what the trainer does again; a trial that starts again counts its iterations from 1",
        "each report of the trainer is one of the trial, once and in order, also where the trial starts again",
    ),
    (
        "`SyncConfig(syncer=None)`, `sync_on_checkpoint`, `sync_period`",
        "whether and when files are copied to the head",
        "nothing has to be copied: what is stored is stored by the node that has it; a warning where a setting has no "
        "effect",
    ),
    (
        "`SyncConfig(syncer=...)` with a `Syncer` of your own (Ray up to 2.6)",
        "copies checkpoints, which are read back from there",
        "mirrors the experiment's local directory; nothing is read from the mirror, no commit depends on it",
    ),
    (
        "`Checkpoint.from_dict`, `to_dict` (Ray up to 2.6)",
        "pickle",
        "as `from_state`: tensors, arrays and plain values",
    ),
    (
        "`Trainable.reset_config`, `TuneConfig(reuse_actors)`",
        "an actor is used for several trials",
        "no effect, and a warning: a trial costs one fork of a process that has imported everything, while a process "
        "that is used again keeps what the trial before left in it, and ends with that trial's failures. `setup` is "
        "called for each trial: load what takes long in the trainable's module, or give it with "
        "`tune.with_parameters`; both are done once on each node, and trials share the memory. What cannot be forked "
        "(a device's context, threads, connections) is made by each trial",
    ),
    ("An exception in a `Callback`", "ends the experiment", "the same: trials are stopped in order, then `TuneError`"),
    (
        "`SystemExit` and the like in a `Callback`, a stopper, a scheduler, a function that makes names",
        "ends the script",
        "as any exception there: ends the experiment with `TuneError`, and no other run of the process",
    ),
    (
        "`CheckpointConfig(checkpoint_at_end)` of a trial that `stop` or a scheduler ends",
        "one more checkpoint is saved",
        "nothing is done after the report that decided it, so the newest is the last: set `checkpoint_frequency`",
    ),
    (
        "`TuneConfig(trial_dirname_creator)` that gives two trials one directory",
        "they overwrite each other's files",
        "refused, with both trials named",
    ),
    (
        "`ResultGrid.get_best_result` of a single trial, with a metric that it has not reported",
        "that trial",
        "an error, as with several trials",
    ),
    ("`Callback` hooks", "called in the loop, before anything is stored", "called in a thread, for what is durable"),
    ("`Callback.get_state`, `set_state`", "kept with the experiment, pickled", "not called"),
    ("TUNE_GLOBAL_CHECKPOINT_S, TUNE_RESULT_BUFFER_LENGTH, ...", "tune Ray Tune's own files and loops", "ignored"),
)
"""What the names do not show: (what, Ray, Holdfast)."""

"""Every deliberate difference between Holdfast's public names and Ray Train's (2.60), with its reason.

`test_surface` holds the keys to what an installed Ray has, `page` makes docs/migrating.md from them.
"""

from __future__ import annotations

__all__ = ["BEHAVIOUR", "MISSING", "OTHER_DEFAULTS", "OURS"]

_TUNE = "a part of Ray Tune; Ray Train refuses it as well"
_RAY_DATA = "a part of Ray Data"

MISSING = {
    "train.DataConfig.configure": _RAY_DATA,
    "train.DataConfig.default_ingest_options": _RAY_DATA,
    "train.NCCLHangError": "hangs of any kind are found by `FailureConfig(progress_timeout_s=...)`",
    "train.RunConfig.storage_context": "internal to Ray; in a worker there is `get_context().get_storage()`",
    "train.ScalingConfig.from_placement_group_factory": _TUNE,
    "train.TrainContext.get_trial_resources": _TUNE,
    "train.torch.TorchCheckpoint.get_preprocessor": _RAY_DATA,
    "train.torch.TorchCheckpoint.set_preprocessor": _RAY_DATA,
}
"""What Ray has and Holdfast does not."""

OTHER_DEFAULTS = {
    "train.report(checkpoint_upload_mode)": (
        "`report` returns once the checkpoint is copied, and it is committed while training goes on; `SYNC` waits for "
        "the commit"
    ),
}
"""Parameters whose default is another than Ray's."""

_INTERNAL = "made by Holdfast, not by scripts"

OURS = {
    "train.CheckpointConfig(on_conflict)": "what to do with a file name that several ranks give",
    "train.CheckpointConfig(target_overhead)": "how much of the time `should_checkpoint` may spend",
    "train.DataParallelTrainer": "runs any Python function; Ray has it in a module of its own",
    "train.FailureConfig(progress_timeout_s)": "replaces a group that reports nothing for so long",
    "train.FailureConfig(stop_on_repeated_error)": "whether an exception that comes twice in the same way ends the run",
    "train.RunConfig(local_dir)": "older name of `storage_path`",
    "train.RunConfig(resume)": "what to do with a run of this name that is there already",
    "train.RunConfig(takeover)": "fences another driver that holds the run",
    "train.ScalingConfig(engine)": "what starts agents",
    "train.ScalingConfig(spares)": "agents that are prepared and idle, for the place of one that is lost",
    "train.ScalingConfig(last_call_timeout)": "how long an elastic run waits for more workers before it starts",
    "train.ScalingConfig(listen)": "where agents of other machines are accepted",
    "train.SyncConfig(sync_on_checkpoint)": "older name of `sync_artifacts_on_checkpoint`",
    "train.SyncConfig(syncer)": "setting of older versions of Ray, warned of",
    "train.SyncConfig(upload_dir)": "older name of `storage_path`",
    "train.TrainContext(assignment)": _INTERNAL,
    "train.TrainContext(filesystem)": _INTERNAL,
    "train.TrainContext(metadata)": _INTERNAL,
    "train.backend": "a module, as in Ray",
    "train.collective": "a module, as in Ray",
    "train.context": "a module, as in Ray",
    "train.should_checkpoint": "whether a checkpoint is worth its cost now",
    "train.get_dataset_shard(elastic)": "each row once an epoch, across failures and with any number of workers",
    "train.get_dataset_shard(global_batch_size)": "so many rows a step in all, with any number of workers",
    "train.get_dataset_shard(rng_state)": "saves and restores the states of random generators",
    "train.report(complete)": "this rank's checkpoint is whole, and is committed even if another rank dies",
    "train.torch": "a module, as in Ray",
    "train.torch.ElasticSampler": "each sample once an epoch, across failures and with any number of workers",
    "train.torch.prepare_data_loader(elastic)": "the loader goes on where the checkpoint left it",
    "train.torch.prepare_data_loader(global_batch_size)": "so many samples a step in all, with any number of workers",
    "train.torch.prepare_data_loader(rng_state)": "saves and restores the states of random generators",
    "train.torch.unwrap_model": "the module that `prepare_model` was given",
}
"""What Holdfast has and Ray does not."""

BEHAVIOUR = (
    (
        "The same exception at the same line after the same iteration, twice in a row",
        "is retried until `max_failures` is spent",
        "ends the run, since it would come again; `FailureConfig(stop_on_repeated_error=False)` retries",
    ),
    (
        "Settings that Ray refuses as deprecated",
        "raises `DeprecationWarning`",
        "warns once, with what to use instead; `metadata`, `resume_from_checkpoint`, `restore`, `can_restore`, "
        "`sync_config` and `verbose` do what they say",
    ),
    ("Metrics reported without a checkpoint", "dropped", "kept, every one: `result.metrics`, result files, data frame"),
    (
        "`report` without a checkpoint",
        "waits for every rank",
        "waits for nobody; if a rank raises right after it, the others get 2 s to make the same report",
    ),
    (
        "The same file name from several ranks",
        "the last upload wins",
        "the lowest rank's counts, and alone is uploaded; a warning where bytes differ",
    ),
    ("`checkpoint_dir_name` of a checkpoint that is there", "mixes files", "an error"),
    ("NaN or missing scores", 'best with `"min"`', "worst in both orders"),
    ("A finished run, called again with the same script", "trains again", "returns its result at once"),
    ("A relative `storage_path`", "an error", "a path"),
    (
        "A validation function",
        "a Ray task, with `ray_remote_kwargs`",
        "one worker of its own on the same machine; `ray_remote_kwargs` are ignored with a warning",
    ),
    ("`num_workers=0`", "stores nothing", "stores as usual"),
    (
        "`ray.init(...)`",
        "starts or joins a cluster",
        'accepted; only `runtime_env` and `address="ray://..."` have an effect',
    ),
    (
        "`datasets=`",
        "Ray data sets",
        "any sequence or iterable, or a function that opens one; each rank gets the same number of rows",
    ),
    (
        "Hooks of a `Backend`",
        "drive the group of actors",
        "refused; `BackendConfig.train_func_context` is entered in each worker",
    ),
    ("`TorchCheckpoint.from_model`", "pickles the module", "keeps its `state_dict`; nothing is unpickled from storage"),
)
"""What the names do not show: (what, Ray, Holdfast)."""

"""What a training function calls: `train.report` and its companions.

Each finds the worker's session (`holdfast.worker.session`) and hands over; the package `holdfast.train` re-exports
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.core.preemption_info import PreemptionInfo, preemption_info
from holdfast.errors import ConfigError
from holdfast.train.data import DatasetShard
from holdfast.train.validation import ValidationTaskConfig, task_of
from holdfast.train.worker_inputs import current_inputs
from holdfast.worker.context import TrainContext
from holdfast.worker.session import (
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    ReportedCheckpoint,
    UploadFunction,
    current,
)

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint

__all__ = [
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "report",
    "should_checkpoint",
]


def report(
    metrics: Mapping[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode | None = None,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: UploadFunction | None = None,
    validation: bool | ValidationTaskConfig = False,
    *,
    complete: bool = False,
) -> None:
    """Tell the run how it goes, and give it a checkpoint.

    `metrics` are numbers, strings, booleans, None, and lists and dicts of these; rank 0's are kept, every one.
    A `checkpoint` may come from any ranks: their files are merged into one. It is the run's own when this
    returns, and committed soon afterwards; while an earlier one is still on its way, this waits.

    `checkpoint_dir_name` names the checkpoint's directory: rank 0's value counts, with a checkpoint or without one,
    otherwise that of the lowest rank that gives one.
    `checkpoint_upload_mode`: `ASYNC` returns after the copy (the default), `SYNC` after the commit, `NO_UPLOAD` takes
    files that were written straight into the run's directory, and returns after the commit as well.
    `delete_local_checkpoint_after_upload` lets the directory go, which may save the copy; it is the default where
    `ASYNC` is asked for by name.
    `checkpoint_upload_fn(checkpoint, name)` stores the files itself, at
    `get_context().get_storage().build_checkpoint_path_from_name(name)`, and returns a `Checkpoint` of that place. It
    is called in here, or, with `ASYNC`, in a thread: reports made meanwhile wait behind it, and what it raises is
    raised by the next call.
    `validation`: have the trainer's `ValidationConfig` score the checkpoint once it is committed, while training goes
    on; a `ValidationTaskConfig` says how.
    `complete`: this rank's checkpoint is all that is needed to resume, whatever other ranks give: should one of those
    die before it has made the same report, it is committed all the same. `Checkpoint.from_state` knows this by itself.
    """
    current("train.report()").report(
        metrics,
        checkpoint,
        checkpoint_dir_name,
        checkpoint_upload_mode,
        delete_local_checkpoint_after_upload,
        checkpoint_upload_fn,
        task_of(validation) if validation else None,
        complete,
    )


def should_checkpoint() -> bool:
    """Whether to report a checkpoint at this step: as often as it is worth while.

    Young's rule, with the stall and the time to storage as they are measured and the failures seen so far, and never
    more than `CheckpointConfig(target_overhead)` of the time. Every rank must call it at every step; all get the same
    answer at the same call. Costs next to nothing when none is due.

    Also true when the worker group is about to change, because a node is drained or another has joined: every rank then
    stays in its next report, and the next generation goes on from there.
    """
    return current("train.should_checkpoint()").should_checkpoint()


def get_checkpoint() -> Checkpoint | None:
    """The newest committed checkpoint of the run, or None where there is none yet: what to resume from.

    Right after a `report` with a checkpoint it is that one: once every rank has made that report, this waits for the
    commit. Ranks that have not made it after a minute are named in a warning, and the checkpoint before is returned.
    """
    return current("train.get_checkpoint()").get_checkpoint()


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """All committed checkpoints of the run with their metrics, oldest first.

    Waits until every checkpoint up to this rank's last report, whichever ranks gave it, is committed or given up, but
    no longer than `timeout_s`: then it gives what there is. With `VALIDATED` also until every validation that was asked
    for has ended; `status` says how, and its metrics are among the checkpoint's.
    """
    if not isinstance(consistency_mode, CheckpointConsistencyMode):
        raise ConfigError(
            f"get_all_reported_checkpoints(consistency_mode) must be a CheckpointConsistencyMode, not "
            f"{consistency_mode!r}."
        )
    return current("train.get_all_reported_checkpoints()").get_all_reported_checkpoints(consistency_mode, timeout_s)


def get_context() -> TrainContext:
    """This worker's rank, the group's size, and the run's names."""
    session = current("train.get_context()")
    return TrainContext(session.assignment, session.filesystem, current_inputs().metadata)


def get_dataset_shard(
    dataset_name: str | None = None,
    *,
    elastic: bool = False,
    global_batch_size: int | None = None,
    rng_state: bool = False,
) -> DatasetShard | None:
    """This worker's rows of the data set that the trainer was given as `datasets={dataset_name: ...}`.

    None where it was given none. Without a name it is the only one, or "train".
    `elastic`: each row is consumed exactly once an epoch, across failures and with any number of workers after them;
    `global_batch_size` and `rng_state` as of `train.torch.prepare_data_loader`.
    """
    session = current("train.get_dataset_shard()")
    here = session.assignment
    if elastic:
        found = current_inputs().datasets.open(dataset_name)
        if found is None:
            return None
        name, data = found
        if name not in session.elastic_shards:
            from holdfast.train.elastic_shard import ElasticShard

            shard = ElasticShard(data, name, here.rank, here.world_size, global_batch_size, rng_state)
            session.elastic_shards[name] = shard
        kept: DatasetShard = session.elastic_shards[name]
        return kept
    if global_batch_size is not None or rng_state:
        what = "rng_state" if global_batch_size is None else "global_batch_size"
        raise ConfigError(f"get_dataset_shard({what}) needs elastic=True.")
    return current_inputs().datasets.shard(dataset_name, here.rank, here.world_size)


def get_preemption_info() -> PreemptionInfo | None:
    """Which nodes with workers of this group are about to be taken away, and when; None if none is.

    They were told so by SIGTERM or a notice, or drained with `holdfast drain` (docs/hosts.md). The group goes on
    elsewhere from the next checkpoint that it reports. This waits for nobody, so ranks may learn of it at different
    steps: to save on all of them at the same step, ask `should_checkpoint()`.
    """
    found = current("train.get_preemption_info()").preemption()
    return None if found is None else preemption_info(found)

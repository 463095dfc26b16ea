"""The callback for `Trainer(callbacks=[...])` that reports each epoch with a Lightning checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from holdfast import train
from holdfast.train.lightning.strategies import pl
from holdfast.train.validation import ValidationTaskConfig
from holdfast.worker.session import CheckpointUploadMode

__all__ = ["RayTrainReportCallback", "ReportCallback", "report_checkpoint"]


class ReportCallback(pl.callbacks.Callback):  # type: ignore[misc]
    """At the end of each training epoch, reports the logged metrics, `epoch` and `step`, with a checkpoint that holds
    `checkpoint.ckpt`: `trainer.fit(model, ckpt_path=...)` goes on from it.

    `checkpoint_upload_mode` and `validation` are those of `train.report`.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(
        self,
        checkpoint_upload_mode: CheckpointUploadMode | None = None,
        validation: bool | ValidationTaskConfig = False,
    ) -> None:
        super().__init__()
        self.checkpoint_upload_mode = checkpoint_upload_mode
        self.validation = validation

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning calls this on every rank."""
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        report_checkpoint(
            trainer,
            metrics,
            self.CHECKPOINT_NAME,
            checkpoint_upload_mode=self.checkpoint_upload_mode,
            validation=self.validation,
        )


def report_checkpoint(
    trainer: pl.Trainer,
    metrics: dict[str, Any],
    filename: str,
    checkpoint_upload_mode: CheckpointUploadMode | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> None:
    """Report metrics with a checkpoint of Lightning's, which is one file or, where it is sharded, a directory. Called
    on every rank."""
    # Strategies that shard write the files of all ranks to rank 0's path, each on its own node.
    rank, local_rank = train.get_context().get_world_rank(), train.get_context().get_local_rank()
    mine = tempfile.mkdtemp(prefix="lightning_checkpoint_") if rank == 0 else ""
    directory = Path(trainer.strategy.broadcast(mine))
    directory.mkdir(parents=True, exist_ok=True)
    trainer.save_checkpoint(directory / filename, weights_only=False)  # ends with a barrier
    gives = local_rank == 0 and any(directory.iterdir())
    checkpoint = train.Checkpoint.from_directory(directory) if gives else None
    options: dict[str, Any] = {}
    if gives:
        options = {"delete_local_checkpoint_after_upload": True, "validation": validation}
    train.report(metrics, checkpoint, checkpoint_upload_mode=checkpoint_upload_mode, **options)
    if local_rank == 0 and not gives:
        shutil.rmtree(directory, ignore_errors=True)


RayTrainReportCallback = ReportCallback

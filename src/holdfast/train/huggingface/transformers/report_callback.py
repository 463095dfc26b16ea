"""The callback for `transformers.Trainer(callbacks=[...])` that reports each checkpoint which that saves."""

from __future__ import annotations

import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from holdfast import train

__all__ = ["RayTrainReportCallback", "ReportCallback"]


class ReportCallback(TrainerCallback):  # type: ignore[misc]
    """Whenever the `Trainer` saves, reports the metrics that it has logged so far, with a checkpoint that holds its
    files in `checkpoint/`: `trainer.train(resume_from_checkpoint=...)` goes on from there.

    Evaluate as often as you save (eval_strategy, save_strategy), so that the metrics belong to the checkpoint.
    """

    CHECKPOINT_NAME = "checkpoint"

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The `Trainer` calls this on every rank, after it has saved."""
        metrics = {name: value for log in state.log_history for name, value in log.items()}
        # By its step: an earlier generation may have left a later one there, which is not this run's any more.
        saved = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        # Also a barrier: every rank has written its files.
        rank_zeros = train.collective.broadcast_from_rank_zero(_identity(saved))
        shares = train.get_context().get_world_rank() != 0 and _identity(saved) == rank_zeros
        if shares or not saved.is_dir():
            train.report(metrics)
            return
        directory = tempfile.mkdtemp(prefix="transformers_checkpoint_")
        shutil.copytree(saved, Path(directory, self.CHECKPOINT_NAME))
        train.report(metrics, train.Checkpoint.from_directory(directory), delete_local_checkpoint_after_upload=True)


def _identity(directory: Path) -> list[str | int] | None:
    """Tells whether two ranks speak of the same directory: a relative output_dir is one for each rank."""
    if not directory.is_dir():
        return None
    found = directory.stat()
    return [platform.node(), found.st_dev, found.st_ino]


RayTrainReportCallback = ReportCallback

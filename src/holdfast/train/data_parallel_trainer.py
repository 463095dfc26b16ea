"""`DataParallelTrainer` where Ray Train has it."""

from __future__ import annotations

from holdfast.train.trainer import DataParallelTrainer

__all__ = ["DataParallelTrainer"]

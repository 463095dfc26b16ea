"""`DataParallelTrainer` where the guides of Ray Train import it from."""

from __future__ import annotations

from holdfast.train.trainer import DataParallelTrainer

__all__ = ["DataParallelTrainer"]

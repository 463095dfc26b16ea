"""`LightGBMCheckpoint`: a `Checkpoint` made from a model and turned into one again, for old scripts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lightgbm import Booster

from holdfast.checkpoint.handle import Checkpoint

__all__ = ["LightGBMCheckpoint"]


class LightGBMCheckpoint(Checkpoint):
    """A checkpoint that holds one LightGBM model."""

    MODEL_FILENAME = "model.txt"

    @classmethod
    def from_model(cls, booster: Booster, *, path: str | None = None) -> LightGBMCheckpoint:
        """Save the model in the directory `path`, or in a new temporary one."""
        directory = path or tempfile.mkdtemp()
        booster.save_model(str(Path(directory, cls.MODEL_FILENAME)))
        return cls(directory)

    def get_model(self) -> Any:
        """The model."""
        with self.as_directory() as directory:
            return Booster(model_file=str(Path(directory, self.MODEL_FILENAME)))

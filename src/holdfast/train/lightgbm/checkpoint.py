"""`LightGBMCheckpoint`: a `Checkpoint` made from a model and turned into one again, for old scripts."""

from __future__ import annotations

from pathlib import Path

from lightgbm import Booster

from holdfast.train.boosting import BoosterCheckpoint

__all__ = ["LightGBMCheckpoint"]


class LightGBMCheckpoint(BoosterCheckpoint):
    """A checkpoint that holds one LightGBM model."""

    MODEL_FILENAME = "model.txt"

    def get_model(self) -> Booster:
        """The model."""
        with self.as_directory() as directory:
            return Booster(model_file=str(Path(directory, self.MODEL_FILENAME)))

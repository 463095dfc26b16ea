"""`TorchCheckpoint`: a directory with one model's `state_dict`, for scripts that use Ray's older class.

`Checkpoint.from_state` does the same without a file and a copy. What is read is read with `weights_only=True`: no code
of a checkpoint is ever run.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["TorchCheckpoint"]

_DDP_PREFIX = "module."


class TorchCheckpoint(Checkpoint):
    """A checkpoint that holds `model.pt`."""

    MODEL_FILENAME = "model.pt"

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], *, preprocessor: Any = None) -> TorchCheckpoint:
        """Of a model's `state_dict()`, without DDP's prefix. The file goes when this object does: report it before."""
        import torch

        if preprocessor is not None:
            raise ConfigError(
                "TorchCheckpoint(preprocessor) is a part of Ray Data and is not kept: save what it learned as a file."
            )
        directory = tempfile.mkdtemp(prefix="holdfast_torch_")
        state = {name.removeprefix(_DDP_PREFIX): value for name, value in state_dict.items()}
        torch.save(state, Path(directory, cls.MODEL_FILENAME))
        made = cls(directory)
        weakref.finalize(made, shutil.rmtree, directory, ignore_errors=True)
        return made

    @classmethod
    def from_model(cls, model: torch.nn.Module, *, preprocessor: Any = None) -> TorchCheckpoint:
        """Of a model's parameters: its class is not kept, so `get_model` needs a model to load them into."""
        return cls.from_state_dict(model.state_dict(), preprocessor=preprocessor)

    def get_model(self, model: torch.nn.Module | None = None) -> torch.nn.Module:
        """`model` with the parameters of this checkpoint."""
        import torch

        if model is None:
            raise ConfigError(
                "TorchCheckpoint.get_model() needs the model: no code is read from storage, so make one and pass it."
            )
        with self.as_directory() as directory:
            state = torch.load(Path(directory, self.MODEL_FILENAME), map_location="cpu", weights_only=True)
        model.load_state_dict({name.removeprefix(_DDP_PREFIX): value for name, value in state.items()})
        return model

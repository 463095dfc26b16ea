"""Lightning's strategies and cluster environment, with the ranks, the device and the process group of the run.

The process group is there before the training function is called (`holdfast.train.torch`), so a `Trainer` starts no
processes and joins it. `pl` is Lightning under whichever of its two names is installed.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from holdfast import train
from holdfast.train.torch.devices import get_device

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.plugins.environments import LightningEnvironment as _Environment
else:
    # The one that the script uses: classes of the two packages are not the same.
    _use_old_name = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    try:
        pl = importlib.import_module("pytorch_lightning" if _use_old_name else "lightning.pytorch")
    except ModuleNotFoundError:
        pl = importlib.import_module("pytorch_lightning")
    _Environment = importlib.import_module(f"{pl.__name__}.plugins.environments").LightningEnvironment

__all__ = [
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "LightningEnvironment",
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "pl",
    "prepare_trainer",
]


class _OnRunsDevice:
    """What all strategies take from the run."""

    @property
    def root_device(self) -> torch.device:
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        context = train.get_context()
        return {"num_replicas": context.get_world_size(), "rank": context.get_world_rank()}


class RayDDPStrategy(_OnRunsDevice, pl.strategies.DDPStrategy):  # type: ignore[misc]
    """Data-parallel training. `TorchConfig` sets the backend and the timeout of the process group, not this."""


class RayFSDPStrategy(_OnRunsDevice, pl.strategies.FSDPStrategy):  # type: ignore[misc]
    """Fully sharded training (FSDP)."""


class RayDeepSpeedStrategy(_OnRunsDevice, pl.strategies.DeepSpeedStrategy):  # type: ignore[misc]
    """Training with DeepSpeed. Not run in Holdfast's tests: DeepSpeed needs GPUs."""


class RayLightningEnvironment(_Environment):  # type: ignore[misc]
    """Ranks and sizes as the run has them; nobody can change them."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return train.get_context().get_world_size()

    def global_rank(self) -> int:
        return train.get_context().get_world_rank()

    def local_rank(self) -> int:
        return train.get_context().get_local_rank()

    def node_rank(self) -> int:
        return train.get_context().get_node_rank()

    def set_world_size(self, size: int) -> None:
        """Ignored."""

    def set_global_rank(self, rank: int) -> None:
        """Ignored."""

    def teardown(self) -> None:
        """The process group and its variables are the run's: they stay for the next `Trainer`."""


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Check that this `Trainer` uses a strategy and an environment of this module; it is returned as it is."""
    if not isinstance(trainer.strategy, _OnRunsDevice):
        raise RuntimeError(
            f"Trainer(strategy) is a {type(trainer.strategy).__name__}: give it RayDDPStrategy(), RayFSDPStrategy() or "
            "RayDeepSpeedStrategy() of holdfast.train.lightning."
        )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and not isinstance(environment, RayLightningEnvironment):
        raise RuntimeError(
            f"Trainer(plugins) makes the environment a {type(environment).__name__}: write "
            "plugins=[holdfast.train.lightning.RayLightningEnvironment()]."
        )
    return trainer


DDPStrategy = RayDDPStrategy
FSDPStrategy = RayFSDPStrategy
DeepSpeedStrategy = RayDeepSpeedStrategy
LightningEnvironment = RayLightningEnvironment

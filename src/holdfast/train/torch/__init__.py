"""PyTorch on Holdfast: `TorchTrainer`, and what a training function calls to become distributed.

Names are resolved on first use, so that importing this package imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.train.torch.checkpoint import TorchCheckpoint as TorchCheckpoint
    from holdfast.train.torch.config import TorchConfig as TorchConfig
    from holdfast.train.torch.devices import get_device as get_device
    from holdfast.train.torch.devices import get_devices as get_devices
    from holdfast.train.torch.loaders import prepare_data_loader as prepare_data_loader
    from holdfast.train.torch.mixed_precision import accelerate as accelerate
    from holdfast.train.torch.mixed_precision import backward as backward
    from holdfast.train.torch.mixed_precision import prepare_optimizer as prepare_optimizer
    from holdfast.train.torch.models import prepare_model as prepare_model
    from holdfast.train.torch.models import unwrap_model as unwrap_model
    from holdfast.train.torch.sampler import ElasticSampler as ElasticSampler
    from holdfast.train.torch.seeds import enable_reproducibility as enable_reproducibility
    from holdfast.train.torch.trainer import TorchTrainer as TorchTrainer

__all__ = [
    "ElasticSampler",
    "TorchCheckpoint",
    "TorchConfig",
    "TorchTrainer",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "unwrap_model",
]

_HOMES = {
    "ElasticSampler": "sampler",
    "TorchCheckpoint": "checkpoint",
    "TorchConfig": "config",
    "TorchTrainer": "trainer",
    "accelerate": "mixed_precision",
    "backward": "mixed_precision",
    "enable_reproducibility": "seeds",
    "get_device": "devices",
    "get_devices": "devices",
    "prepare_data_loader": "loaders",
    "prepare_model": "models",
    "prepare_optimizer": "mixed_precision",
    "unwrap_model": "models",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

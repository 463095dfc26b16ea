"""`LightGBMConfig`: nothing to set; it says that workers of a `LightGBMTrainer` have a network."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.train.backend import BackendConfig

__all__ = ["LightGBMConfig"]


@dataclass
class LightGBMConfig(BackendConfig):
    """LightGBM's network parameters are found out by the workers; see `get_network_params`."""

    @property
    def framework(self) -> str:
        return "lightgbm"

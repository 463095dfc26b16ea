"""`LightGBMConfig`: nothing to set; it says that workers of a `LightGBMTrainer` have a network."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LightGBMConfig"]


@dataclass
class LightGBMConfig:
    """LightGBM's network parameters are found out by the workers; see `get_network_params`."""

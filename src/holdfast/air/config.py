"""`air.config`: the configurations of a `Tuner`, which trainers take as well."""

from __future__ import annotations

from holdfast.train.config import ScalingConfig
from holdfast.tune.config import CheckpointConfig, FailureConfig, RunConfig

__all__ = ["CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig"]

"""`JaxConfig`: which devices the workers of a `JaxTrainer` use."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError
from holdfast.train import checks
from holdfast.train.backend import BackendConfig

__all__ = ["JaxConfig"]


@dataclass
class JaxConfig(BackendConfig):
    """`use_gpu` sets JAX_PLATFORMS to "cuda" where the user has not set it; otherwise JAX chooses."""

    use_tpu: bool = False
    use_gpu: bool = False

    def __post_init__(self) -> None:
        checks.flag("JaxConfig(use_gpu)", self.use_gpu)
        if self.use_tpu:
            raise ConfigError("JaxConfig(use_tpu): TPUs are not supported; leave it out.")

    @property
    def framework(self) -> str:
        return "jax"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

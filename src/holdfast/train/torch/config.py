"""`TorchConfig`: how workers of a `TorchTrainer` find each other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError
from holdfast.train import checks
from holdfast.train.backend import BackendConfig

__all__ = ["TorchConfig"]


@dataclass
class TorchConfig(BackendConfig):
    """`backend=None` is gloo on CPUs and nccl on GPUs; `timeout_s` is the deadline of a collective operation.

    `init_method` is accepted for old scripts: workers always meet over a TCP store whose port is open before
    they start.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        if self.backend is not None and (not isinstance(self.backend, str) or not self.backend):
            raise ConfigError(f'TorchConfig(backend) must be "gloo", "nccl", "mpi" or None, not {self.backend!r}.')
        checks.one_of("TorchConfig(init_method)", self.init_method, ("env", "tcp"))
        checks.seconds("TorchConfig(timeout_s)", self.timeout_s)
        checks.has_no_effect(self, {"init_method": "workers always meet over a TCP store."})

    @property
    def framework(self) -> str:
        return "torch"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

"""`BackendConfig` and `Backend`: how a framework is set up around the training function, with Ray's names.

`TorchConfig` and its kin derive from `BackendConfig`. A configuration of the user's own may give a
`train_func_context`: a context manager around the function, in each worker. Ray's hooks of a `Backend` drive a
group of actors from outside; there is no such group here, so a backend that overrides one is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from holdfast.errors import ConfigError

__all__ = ["Backend", "BackendConfig", "check_backend_config"]


class Backend:
    """Ray's hooks around a group of workers. Holdfast calls none of them."""

    share_cuda_visible_devices: bool = False
    has_replica_groups: bool = False

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """In Ray: after the workers have started."""

    def on_training_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """In Ray: before the training function is called."""

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """In Ray: before the workers are stopped."""


class BackendConfig:
    """The base of all configurations of frameworks; does nothing by itself."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context manager in which each worker calls the training function."""
        return nullcontext

    @property
    def framework(self) -> Any:
        return None

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data."""
        return {}


def check_backend_config(value: Any) -> BackendConfig:
    """`value`, or the default for None; a `ConfigError` where it asks for what cannot be done."""
    if value is None:
        return BackendConfig()
    if not isinstance(value, BackendConfig):
        raise ConfigError(f"backend_config must be a BackendConfig, not {type(value).__name__}.")
    hooks = ("on_start", "on_training_start", "on_shutdown")
    overridden = [hook for hook in hooks if getattr(value.backend_cls, hook, None) is not getattr(Backend, hook)]
    if overridden:
        raise ConfigError(
            f"backend_config: {value.backend_cls.__name__}.{overridden[0]} would drive a group of Ray actors, and "
            "there is none here: set the framework up in the training function, or in BackendConfig.train_func_context."
        )
    return value

"""`holdfast.train.jax` under the name that Ray Train gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.train.jax import JaxConfig as JaxConfig
    from holdfast.train.jax import JaxTrainer as JaxTrainer

__all__ = ["JaxConfig", "JaxTrainer"]


def __getattr__(name: str) -> Any:
    from holdfast.train import jax

    return getattr(jax, name)


def __dir__() -> list[str]:
    return sorted(__all__)

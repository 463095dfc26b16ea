"""JAX on Holdfast: `JaxTrainer` makes the workers one `jax.distributed` system."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.train.jax.config import JaxConfig as JaxConfig
    from holdfast.train.jax.trainer import JaxTrainer as JaxTrainer

__all__ = ["JaxConfig", "JaxTrainer"]

__getattr__, __dir__ = lazy_attributes(__name__, {"JaxConfig": "config", "JaxTrainer": "trainer"}, needs={"jax": "jax"})

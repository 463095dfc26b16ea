"""`JaxTrainer`: a `DataParallelTrainer` whose workers are one `jax.distributed` system."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.train.config import RunConfig, ScalingConfig
from holdfast.train.jax.config import JaxConfig
from holdfast.train.jax.distributed import JaxDistributed
from holdfast.train.lazy_attributes import require
from holdfast.train.trainer import DataParallelTrainer
from holdfast.train.validation import ValidationConfig

if TYPE_CHECKING:
    from holdfast.train.data import DataConfig
    from holdfast.worker.job import Framework

__all__ = ["JaxTrainer"]


class JaxTrainer(DataParallelTrainer):
    """Trains a JAX function on every worker: `jax.devices()` there are those of all workers together."""

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        jax_config: JaxConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: DataConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        require("JaxTrainer", {"jax": "jax"})
        if jax_config is not None and not isinstance(jax_config, JaxConfig):
            raise ConfigError(f"jax_config must be a JaxConfig, not {type(jax_config).__name__}.")
        use_gpu = scaling_config is not None and scaling_config.use_gpu
        self.jax_config = jax_config or JaxConfig(use_gpu=use_gpu)
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            scaling_config=scaling_config,
            run_config=run_config,
            backend_config=self.jax_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
        )

    def _preload(self) -> tuple[str, ...]:
        return ("jax",)

    def _framework(self) -> Framework | None:
        return JaxDistributed(self.jax_config.use_gpu)

"""`LightGBMTrainer`: a `DataParallelTrainer` whose workers know LightGBM's network parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.train.booster_trainer import BoosterTrainer
from holdfast.train.config import RunConfig, ScalingConfig
from holdfast.train.lightgbm.config import LightGBMConfig
from holdfast.train.lightgbm.network import LightGBMNetwork
from holdfast.train.validation import ValidationConfig

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.train.data import DataConfig
    from holdfast.worker.job import Framework

__all__ = ["LightGBMTrainer"]


class LightGBMTrainer(BoosterTrainer):
    """Calls a function that calls `lightgbm.train` on every worker. With `get_network_params()` among its parameters,
    the workers train one model."""

    _package = "lightgbm"
    _config_type = LightGBMConfig

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        lightgbm_config: LightGBMConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        label_column: str | None = None,
        params: Mapping[str, Any] | None = None,
        num_boost_round: int | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            lightgbm_config,
            {"label_column": label_column, "params": params, "num_boost_round": num_boost_round},
            train_loop_config=train_loop_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )

    def _preload(self) -> tuple[str, ...]:
        return ("lightgbm",)

    def _framework(self) -> Framework | None:
        return LightGBMNetwork()

"""`TorchTrainer`: a `DataParallelTrainer` whose workers are one `torch.distributed` group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.train.config import RunConfig, ScalingConfig
from holdfast.train.lazy_attributes import require
from holdfast.train.request import is_one_of_torchrun
from holdfast.train.torch.config import TorchConfig
from holdfast.train.torch.group import TorchGroup
from holdfast.train.torch.preload import preload_for
from holdfast.train.trainer import DataParallelTrainer
from holdfast.train.validation import ValidationConfig

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.train.data import DataConfig
    from holdfast.worker.job import Framework

__all__ = ["TorchTrainer"]


class TorchTrainer(DataParallelTrainer):
    """Trains a PyTorch function on every worker, with the process group made and taken down around it."""

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        require(type(self).__name__, {"torch": "torch"})
        if torch_config is not None and not isinstance(torch_config, TorchConfig):
            raise ConfigError(f"torch_config must be a TorchConfig, not {type(torch_config).__name__}.")
        self.torch_config = torch_config or TorchConfig()
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            scaling_config=scaling_config,
            run_config=run_config,
            backend_config=self.torch_config,
            datasets=datasets,
            dataset_config=dataset_config,
            validation_config=validation_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )

    def _preload(self) -> tuple[str, ...]:
        return preload_for(self.train_loop_per_worker, self.scaling_config.max_workers)

    def _framework(self) -> Framework | None:
        torchrun = is_one_of_torchrun(self.scaling_config.num_workers)
        return TorchGroup(self.torch_config.backend, self.torch_config.timeout_s, from_environment=torchrun)

"""The public training API: what a script imports, under the names that users of Ray Train know.

Every name is resolved on first use, so that importing this package costs next to nothing and brings in neither torch
nor pyarrow. In the driver: the trainers, the configurations, `Result`. In the training function: `report`,
`should_checkpoint`, `get_checkpoint`, `get_context`, `collective`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint as Checkpoint
    from holdfast.core.preemption_info import PreemptionInfo as PreemptionInfo
    from holdfast.errors import ControllerError as ControllerError
    from holdfast.errors import PreemptionError as PreemptionError
    from holdfast.errors import TrainingFailedError as TrainingFailedError
    from holdfast.errors import WorkerGroupError as WorkerGroupError
    from holdfast.train import backend as backend
    from holdfast.train import collective as collective
    from holdfast.train import context as context
    from holdfast.train import torch as torch
    from holdfast.train.backend import BackendConfig as BackendConfig
    from holdfast.train.callbacks import UserCallback as UserCallback
    from holdfast.train.config import CheckpointConfig as CheckpointConfig
    from holdfast.train.config import FailureConfig as FailureConfig
    from holdfast.train.config import LoggingConfig as LoggingConfig
    from holdfast.train.config import RunConfig as RunConfig
    from holdfast.train.config import ScalingConfig as ScalingConfig
    from holdfast.train.config import SyncConfig as SyncConfig
    from holdfast.train.data import TRAIN_DATASET_KEY as TRAIN_DATASET_KEY
    from holdfast.train.data import DataConfig as DataConfig
    from holdfast.train.functions import get_all_reported_checkpoints as get_all_reported_checkpoints
    from holdfast.train.functions import get_checkpoint as get_checkpoint
    from holdfast.train.functions import get_context as get_context
    from holdfast.train.functions import get_dataset_shard as get_dataset_shard
    from holdfast.train.functions import get_preemption_info as get_preemption_info
    from holdfast.train.functions import report as report
    from holdfast.train.functions import should_checkpoint as should_checkpoint
    from holdfast.train.result import Result as Result
    from holdfast.train.trainer import DataParallelTrainer as DataParallelTrainer
    from holdfast.train.validation import ValidationConfig as ValidationConfig
    from holdfast.train.validation import ValidationFn as ValidationFn
    from holdfast.train.validation import ValidationTaskConfig as ValidationTaskConfig
    from holdfast.worker.context import TrainContext as TrainContext
    from holdfast.worker.session import CheckpointConsistencyMode as CheckpointConsistencyMode
    from holdfast.worker.session import CheckpointUploadMode as CheckpointUploadMode
    from holdfast.worker.session import ReportedCheckpoint as ReportedCheckpoint
    from holdfast.worker.session import ReportedCheckpointStatus as ReportedCheckpointStatus

_HOMES = {
    "BackendConfig": "holdfast.train.backend",
    "Checkpoint": "holdfast.checkpoint.handle",
    "CheckpointConfig": "holdfast.train.config",
    "CheckpointConsistencyMode": "holdfast.worker.session",
    "CheckpointUploadMode": "holdfast.worker.session",
    "ControllerError": "holdfast.errors",
    "DataConfig": "holdfast.train.data",
    "DataParallelTrainer": "holdfast.train.trainer",
    "FailureConfig": "holdfast.train.config",
    "LoggingConfig": "holdfast.train.config",
    "PreemptionError": "holdfast.errors",
    "PreemptionInfo": "holdfast.core.preemption_info",
    "ReportedCheckpoint": "holdfast.worker.session",
    "ReportedCheckpointStatus": "holdfast.worker.session",
    "Result": "holdfast.train.result",
    "RunConfig": "holdfast.train.config",
    "ScalingConfig": "holdfast.train.config",
    "SyncConfig": "holdfast.train.config",
    "TRAIN_DATASET_KEY": "holdfast.train.data",
    "TrainContext": "holdfast.worker.context",
    "TrainingFailedError": "holdfast.errors",
    "UserCallback": "holdfast.train.callbacks",
    "ValidationConfig": "holdfast.train.validation",
    "ValidationFn": "holdfast.train.validation",
    "ValidationTaskConfig": "holdfast.train.validation",
    "WorkerGroupError": "holdfast.errors",
    "get_all_reported_checkpoints": "holdfast.train.functions",
    "get_checkpoint": "holdfast.train.functions",
    "get_context": "holdfast.train.functions",
    "get_dataset_shard": "holdfast.train.functions",
    "get_preemption_info": "holdfast.train.functions",
    "report": "holdfast.train.functions",
    "should_checkpoint": "holdfast.train.functions",
}
_SUBMODULES = (
    "backend",
    "collective",
    "context",
    "huggingface",
    "jax",
    "lightgbm",
    "lightning",
    "torch",
    "v2",
    "xgboost",
)

__all__ = [
    "BackendConfig",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "ControllerError",
    "DataConfig",
    "DataParallelTrainer",
    "FailureConfig",
    "LoggingConfig",
    "PreemptionError",
    "PreemptionInfo",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "SyncConfig",
    "TRAIN_DATASET_KEY",
    "TrainContext",
    "TrainingFailedError",
    "UserCallback",
    "ValidationConfig",
    "ValidationFn",
    "ValidationTaskConfig",
    "WorkerGroupError",
    "backend",
    "collective",
    "context",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "report",
    "should_checkpoint",
    "torch",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

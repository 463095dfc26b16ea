"""PyTorch Lightning on Holdfast: strategies and an environment that use the run's process group, and a callback that
reports metrics and checkpoints. Use them in the training function of a `TorchTrainer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.train.lightning.report_callback import RayTrainReportCallback as RayTrainReportCallback
    from holdfast.train.lightning.report_callback import ReportCallback as ReportCallback
    from holdfast.train.lightning.strategies import DDPStrategy as DDPStrategy
    from holdfast.train.lightning.strategies import DeepSpeedStrategy as DeepSpeedStrategy
    from holdfast.train.lightning.strategies import FSDPStrategy as FSDPStrategy
    from holdfast.train.lightning.strategies import LightningEnvironment as LightningEnvironment
    from holdfast.train.lightning.strategies import RayDDPStrategy as RayDDPStrategy
    from holdfast.train.lightning.strategies import RayDeepSpeedStrategy as RayDeepSpeedStrategy
    from holdfast.train.lightning.strategies import RayFSDPStrategy as RayFSDPStrategy
    from holdfast.train.lightning.strategies import RayLightningEnvironment as RayLightningEnvironment
    from holdfast.train.lightning.strategies import prepare_trainer as prepare_trainer

__all__ = [
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "LightningEnvironment",
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "ReportCallback",
    "prepare_trainer",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    dict.fromkeys(__all__, "strategies")
    | {"RayTrainReportCallback": "report_callback", "ReportCallback": "report_callback"},
    needs={"lightning": "lightning", "pytorch_lightning": "lightning"},
)

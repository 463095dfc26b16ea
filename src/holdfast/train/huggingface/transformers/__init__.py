"""Hugging Face Transformers on Holdfast: a callback that reports what its `Trainer` saves. Use it in the training
function of a `TorchTrainer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.train.huggingface.transformers.data import prepare_trainer as prepare_trainer
    from holdfast.train.huggingface.transformers.report_callback import RayTrainReportCallback as RayTrainReportCallback
    from holdfast.train.huggingface.transformers.report_callback import ReportCallback as ReportCallback

__all__ = ["RayTrainReportCallback", "ReportCallback", "prepare_trainer"]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "RayTrainReportCallback": "report_callback",
        "ReportCallback": "report_callback",
        "prepare_trainer": "data",
    },
    needs={"transformers": "transformers"},
)

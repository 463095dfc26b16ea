"""XGBoost on Holdfast: `XGBoostTrainer` sets up XGBoost's collective, and the callback reports metrics and models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.train.xgboost.checkpoint import XGBoostCheckpoint as XGBoostCheckpoint
    from holdfast.train.xgboost.config import XGBoostConfig as XGBoostConfig
    from holdfast.train.xgboost.report_callback import RayTrainReportCallback as RayTrainReportCallback
    from holdfast.train.xgboost.report_callback import ReportCallback as ReportCallback
    from holdfast.train.xgboost.trainer import XGBoostTrainer as XGBoostTrainer

__all__ = ["RayTrainReportCallback", "ReportCallback", "XGBoostCheckpoint", "XGBoostConfig", "XGBoostTrainer"]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "RayTrainReportCallback": "report_callback",
        "ReportCallback": "report_callback",
        "XGBoostCheckpoint": "checkpoint",
        "XGBoostConfig": "config",
        "XGBoostTrainer": "trainer",
    },
    needs={"xgboost": "xgboost"},
)

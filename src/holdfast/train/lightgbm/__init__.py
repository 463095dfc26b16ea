"""LightGBM on Holdfast: `LightGBMTrainer` sets up LightGBM's network, and the callback reports metrics and models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.train.lazy_attributes import lazy_attributes

if TYPE_CHECKING:
    from holdfast.train.lightgbm.checkpoint import LightGBMCheckpoint as LightGBMCheckpoint
    from holdfast.train.lightgbm.config import LightGBMConfig as LightGBMConfig
    from holdfast.train.lightgbm.network import get_network_params as get_network_params
    from holdfast.train.lightgbm.pandas_dtypes import normalize_pandas_for_lightgbm as normalize_pandas_for_lightgbm
    from holdfast.train.lightgbm.report_callback import RayTrainReportCallback as RayTrainReportCallback
    from holdfast.train.lightgbm.report_callback import ReportCallback as ReportCallback
    from holdfast.train.lightgbm.trainer import LightGBMTrainer as LightGBMTrainer

__all__ = [
    "LightGBMCheckpoint",
    "LightGBMConfig",
    "LightGBMTrainer",
    "RayTrainReportCallback",
    "ReportCallback",
    "get_network_params",
    "normalize_pandas_for_lightgbm",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "LightGBMCheckpoint": "checkpoint",
        "LightGBMConfig": "config",
        "LightGBMTrainer": "trainer",
        "RayTrainReportCallback": "report_callback",
        "ReportCallback": "report_callback",
        "get_network_params": "network",
        "normalize_pandas_for_lightgbm": "pandas_dtypes",
    },
    needs={"lightgbm": "lightgbm"},
)

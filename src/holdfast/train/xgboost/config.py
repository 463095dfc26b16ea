"""`XGBoostConfig`: how workers of an `XGBoostTrainer` speak to each other."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.train import checks

__all__ = ["XGBoostConfig"]


@dataclass
class XGBoostConfig:
    """`xgboost_communicator` is XGBoost's own collective; only "rabit" is there."""

    xgboost_communicator: str = "rabit"

    def __post_init__(self) -> None:
        checks.one_of("XGBoostConfig(xgboost_communicator)", self.xgboost_communicator, ("rabit",))

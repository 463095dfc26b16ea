"""`XGBoostConfig`: how workers of an `XGBoostTrainer` speak to each other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from holdfast.train import checks
from holdfast.train.backend import BackendConfig

__all__ = ["XGBoostConfig"]


@dataclass
class XGBoostConfig(BackendConfig):
    """`xgboost_communicator` is XGBoost's own collective; only "rabit" is there."""

    xgboost_communicator: str = "rabit"

    def __post_init__(self) -> None:
        checks.one_of("XGBoostConfig(xgboost_communicator)", self.xgboost_communicator, ("rabit",))

    @property
    def framework(self) -> str:
        return "xgboost"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

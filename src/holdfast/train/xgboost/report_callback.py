"""The callback for `xgboost.train(callbacks=[...])` that reports each round and saves models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from xgboost import Booster
from xgboost.callback import TrainingCallback

from holdfast.train.boosting import BoosterReports

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint

__all__ = ["RayTrainReportCallback", "ReportCallback"]


class ReportCallback(BoosterReports, TrainingCallback):  # type: ignore[misc]
    """Reports the evaluation of each round as `data-metric`, and the model every "frequency" rounds and at the end."""

    CHECKPOINT_NAME = "model.ubj"

    _results: Mapping[str, Any] = MappingProxyType({})
    """The last round's evaluation, to be reported with the model at the end."""
    _saved_round: int | None = None

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Booster:
        """The model of a checkpoint that this callback reported."""
        with checkpoint.as_directory() as directory:
            return Booster(model_file=str(Path(directory, filename)))

    def after_iteration(self, model: Booster, epoch: int, evals_log: dict[str, dict[str, Any]]) -> bool:
        """XGBoost calls this after each round."""
        self._results = {
            f"{data}-{metric}": values[-1] for data, found in evals_log.items() for metric, values in found.items()
        }
        # All rounds of the model count: `epoch` starts from 0 again when training goes on from a checkpoint.
        last_round = model.num_boosted_rounds() - 1 if isinstance(model, Booster) else epoch
        due = self._is_due(last_round)
        if due:
            self._saved_round = last_round
        self._report(self._results, model, with_model=due)
        return False

    def after_training(self, model: Booster) -> Booster:
        """XGBoost calls this once, after the last round."""
        if self._checkpoint_at_end and self._saved_round != model.num_boosted_rounds() - 1:
            self._report(self._results, model, with_model=True)
        return model


RayTrainReportCallback = ReportCallback

"""The callback for `lightgbm.train(callbacks=[...])` that reports each round and saves models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightgbm import Booster

from holdfast.train.boosting import BoosterReports

if TYPE_CHECKING:
    from lightgbm.callback import CallbackEnv

    from holdfast.checkpoint.handle import Checkpoint

__all__ = ["RayTrainReportCallback", "ReportCallback"]


class ReportCallback(BoosterReports):
    """Reports the evaluation of each round as `data-metric`, and the model every "frequency" rounds and at the end."""

    CHECKPOINT_NAME = "model.txt"

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Booster:
        """The model of a checkpoint that this callback reported."""
        with checkpoint.as_directory() as directory:
            return Booster(model_file=str(Path(directory, filename)))

    def __call__(self, env: CallbackEnv) -> None:
        """LightGBM calls this after each round; with an init_model, rounds are counted on from that model's."""
        at_end = self._checkpoint_at_end and env.iteration == env.end_iteration - 1
        self._report(_results(env), env.model, with_model=at_end or self._is_due(env.iteration))


def _results(env: CallbackEnv) -> dict[str, Any]:
    """`lightgbm.cv` gives a standard deviation besides."""
    results = {}
    for data, metric, value, *others in env.evaluation_result_list or ():
        if len(others) > 1:
            results[f"{data}-{metric}-mean"] = value
            results[f"{data}-{metric}-stdv"] = others[1]
        else:
            results[f"{data}-{metric}"] = value
    return results


RayTrainReportCallback = ReportCallback

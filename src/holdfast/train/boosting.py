"""What XGBoost and LightGBM share: which metrics their callbacks report, and when and how a model is saved."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import ConfigError
from holdfast.train import checks

__all__ = ["BoosterCheckpoint", "BoosterReports"]

Metrics = dict[str, Any]


class BoosterReports:
    """Turns evaluation results into reports; rank 0 gives the model, which is the same on every rank."""

    CHECKPOINT_NAME = ""

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        filename: str | None = None,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Callable[[Metrics], Metrics] | None = None,
    ) -> None:
        """`metrics` are the names to report, as `data-metric`, or a mapping from a name of your own to such a one; None
        reports all. A model is saved as `filename` every `frequency` rounds (0: never) and at the end."""
        super().__init__()
        checks.whole_number(f"{type(self).__name__}(frequency)", frequency, least=0)
        self._names = _renamed(metrics)
        self._filename = filename or self.CHECKPOINT_NAME
        self._frequency = frequency
        self._checkpoint_at_end = checkpoint_at_end
        self._postprocess = results_postprocessing_fn

    def _is_due(self, round_number: int) -> bool:
        """Whether a model is to be saved after this round, counted from 0."""
        return self._frequency > 0 and (round_number + 1) % self._frequency == 0

    def _select(self, results: Mapping[str, Any]) -> Metrics:
        if self._names is not None:
            if missing := [name for name in self._names.values() if name not in results]:
                raise ConfigError(
                    f"{type(self).__name__}(metrics) names {missing[0]!r}, but the evaluation gave "
                    f"{', '.join(sorted(results)) or 'nothing'}: write one of those, as `data-metric`."
                )
            results = {ours: results[theirs] for ours, theirs in self._names.items()}
        selected = dict(results)
        return self._postprocess(selected) if self._postprocess is not None else selected

    def _report(self, results: Mapping[str, Any], model: Any, with_model: bool) -> None:
        from holdfast import train

        if not with_model or train.get_context().get_world_rank() != 0:
            train.report(self._select(results))
            return
        directory = tempfile.mkdtemp()
        model.save_model(str(Path(directory, self._filename)))
        train.report(
            self._select(results),
            checkpoint=train.Checkpoint.from_directory(directory),
            delete_local_checkpoint_after_upload=True,
        )


class BoosterCheckpoint(Checkpoint):
    """A checkpoint that holds one model, for scripts that use Ray's older classes."""

    MODEL_FILENAME = ""

    @classmethod
    def from_model(cls, booster: Any, *, preprocessor: Any = None, path: str | None = None) -> Self:
        """Save the model in the directory `path`, or in a temporary one that goes when this object does."""
        if preprocessor is not None:
            raise ConfigError(
                f"{cls.__name__}(preprocessor) is a part of Ray Data and is not kept: save what it learned as a file."
            )
        directory = path or tempfile.mkdtemp()
        booster.save_model(str(Path(directory, cls.MODEL_FILENAME)))
        made = cls(directory)
        if path is None:
            weakref.finalize(made, shutil.rmtree, directory, ignore_errors=True)
        return made


def _renamed(metrics: str | Sequence[str] | Mapping[str, str] | None) -> dict[str, str] | None:
    if not metrics:
        return None
    if isinstance(metrics, str):
        return {metrics: metrics}
    return dict(metrics) if isinstance(metrics, Mapping) else {name: name for name in metrics}

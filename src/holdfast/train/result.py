"""`Result`: what came of a run, read from its directory and nowhere else.

So `fit()` and `Result.from_path` give the same, also long after, on another machine, and from storage that may only be
read. `holdfast.control.view` folds the journal; this shapes it as users of Ray Train expect.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.handle import Checkpoint
from holdfast.control.view import RunView
from holdfast.core.metrics import flatten_metrics
from holdfast.core.retention import RetentionRule, ranked
from holdfast.errors import HoldfastError, NotFound
from holdfast.storage.uri import join

if TYPE_CHECKING:
    import pandas

__all__ = ["Result"]


class Result:
    """The end, or the present state, of a run."""

    def __init__(self, place: Checkpoint, view: RunView) -> None:
        """`place` is the run's directory: a handle that knows its path and its filesystem."""
        self._place = place
        self._view = view
        self.error: HoldfastError | None = view.error
        """What ended the run, if it failed; `worker_failures` has each rank's."""

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: object | None = None) -> Result:
        """The result of the run at `path` (`<storage_path>/<name>`), finished or not. Writes nothing."""
        place = Checkpoint(path, storage_filesystem)
        store = place._open()
        try:
            store.size("run.json")
        except NotFound:
            if Catalog(store).newest() is None:
                raise RuntimeError(f"Experiment folder {os.fspath(path)} doesn't exist.") from None
        from holdfast.control.view import read_run

        return cls(place, read_run(store))

    def _with_metrics(self, metrics: dict[str, Any] | None) -> Result:
        """The same run as another rank than 0 saw it, whose reports are not in storage."""
        return Result(self._place, replace(self._view, metrics=metrics))

    # ------------------------------------------------------------------ what was reported

    @property
    def metrics(self) -> dict[str, Any] | None:
        """The last report's metrics, exactly as they were reported; None if there was none."""
        return dict(self._view.metrics) if self._view.metrics is not None else None

    @functools.cached_property
    def metrics_dataframe(self) -> pandas.DataFrame | None:
        """A row for every report that counts, read from storage when it is first asked for. Nested metrics become
        columns `a/b`; `training_iteration` and `timestamp` are added where no metric has that name. None if there was
        no report."""
        from holdfast.control.view import read_reports

        rows = read_reports(self._place._open())
        if not rows:
            return None
        import pandas

        return pandas.DataFrame(
            [{"training_iteration": row.iteration, "timestamp": row.at, **flatten_metrics(row.metrics)} for row in rows]
        )

    @property
    def return_value(self) -> Any:
        """What rank 0's training function returned."""
        return self._view.return_value

    @property
    def config(self) -> dict[str, Any] | None:
        """What the run was configured with, as params.json has it."""
        return self._view.params

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest committed checkpoint."""
        return self._handle(self._view.checkpoints[-1].name) if self._view.checkpoints else None

    @property
    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Every checkpoint that is left, with its metrics: the best last, or the newest where no score was named."""
        return self._ranked(self._view.score_attribute, self._view.score_order)

    def get_best_checkpoint(self, metric: str, mode: Literal["max", "min"]) -> Checkpoint:
        """The checkpoint with the highest (`"max"`) or lowest (`"min"`) value of `metric`; nested ones are `a/b`."""
        if mode not in ("max", "min"):
            raise ValueError(f'Unsupported mode: {mode!r}. Please choose from "max" and "min".')
        if not self._view.checkpoints:
            raise RuntimeError("No checkpoint exists in the run directory!")
        names = sorted({name for one in self._view.checkpoints for name in flatten_metrics(one.metrics)})
        if not any(metric in flatten_metrics(one.metrics) or metric in one.metrics for one in self._view.checkpoints):
            raise RuntimeError(f"Invalid metric name {metric!r}! You may choose from: {names}.")
        return self._ranked(metric, mode)[-1][0]

    def _ranked(self, attribute: str | None, order: Literal["max", "min"]) -> list[tuple[Checkpoint, dict[str, Any]]]:
        rule = RetentionRule(score_attribute=attribute, score_order=order)
        return [(self._handle(one.name), dict(one.metrics)) for one in ranked(self._view.checkpoints, rule)]

    def _handle(self, name: str) -> Checkpoint:
        place = self._place
        if place._custom is not None:
            return Checkpoint(join(place._given, name), place._custom)
        return Checkpoint._from_store(place._open(), name)

    # ------------------------------------------------------------------ where

    @property
    def path(self) -> str:
        """The run's directory: a local path, or `bucket/prefix` on remote storage."""
        return self._place.path

    @property
    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem` on which `path` lies."""
        return self._place.filesystem

    def __repr__(self) -> str:
        parts = [f"metrics={self.metrics!r}", f"path={self.path!r}", f"filesystem={self._place._kind!r}"]
        parts.append(f"checkpoint={self.checkpoint!r}")
        if self.error is not None:
            parts.append(f"error={self.error!r}")
        return "Result(\n  " + ",\n  ".join(parts) + "\n)"

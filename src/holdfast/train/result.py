"""`Result`: what came of a run, read from its directory, or sent from a machine that sees it to one that does not.

So `fit()` and `Result.from_path` give the same, also long after, on another machine, and from storage that may only be
read. `holdfast.control.view` folds the journal; this shapes it as users of Ray Train expect.
"""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.handle import Checkpoint
from holdfast.control.view import RunView
from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.metrics import flatten_metrics
from holdfast.core.retention import RetentionRule, ranked
from holdfast.errors import MissingExtra, NotFound, TrainingFailedError
from holdfast.storage.uri import join

if TYPE_CHECKING:
    import pandas

    from holdfast.core.records import Reported
    from holdfast.storage.store import Store

__all__ = ["Result"]


class Result:
    """The end, or the present state, of a run. `fit()` and `from_path` make one from the run's directory; the
    constructor takes what Ray's does.

    `metrics` are the last report's, exactly as they were reported (None if there was none), `checkpoint` is the newest
    committed one, `error` what ended the run, if it failed, `path` the run's directory (a local path, or
    `bucket/prefix` on remote storage), `return_value` what rank 0's training function returned.
    """

    return_value: Any = None

    def __init__(
        self,
        metrics: dict[str, Any] | None,
        checkpoint: Checkpoint | None,
        error: TrainingFailedError | None,
        path: str,
        metrics_dataframe: pandas.DataFrame | None = None,
        best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] | None = None,
        _storage_filesystem: object | None = None,
        return_value: Any = None,
    ) -> None:
        self.metrics = metrics
        self.checkpoint = checkpoint
        self.error = error
        self.path = path
        self.return_value = return_value
        self._place = Checkpoint(path, _storage_filesystem)
        self._view: RunView | None = None
        self._reports: list[Reported] | None = None
        # In the place of the properties that read storage.
        self.__dict__.update(metrics_dataframe=metrics_dataframe, best_checkpoints=best_checkpoints)

    @classmethod
    def _of_run(cls, place: Checkpoint, view: RunView, reports: list[Reported] | None = None) -> Result:
        """`place` is the run's directory: a handle that knows its path and its filesystem. `reports` are all that
        count; None: they are read from there."""
        newest = _handle(place, view.checkpoints[-1].name) if view.checkpoints else None
        metrics = dict(view.metrics) if view.metrics is not None else None
        made = cls(metrics, newest, view.error, place.path, return_value=_decoded(view.return_value))
        made._place, made._view, made._reports = place, view, reports
        del made.__dict__["metrics_dataframe"], made.__dict__["best_checkpoints"]
        return made

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: object | None = None) -> Result:
        """The result of the run at `path` (`<storage_path>/<name>`), finished or not. Writes nothing."""
        place = Checkpoint(path, storage_filesystem)
        store = place._open()
        try:
            store.size("run.json")
        except NotFound:
            if not _has_params(store) and Catalog(store).newest() is None:
                raise RuntimeError(f"Experiment folder {os.fspath(path)} doesn't exist.") from None
        from holdfast.control.view import read_run

        return cls._of_run(place, read_run(store))

    def _with_metrics(self, metrics: dict[str, Any] | None) -> Result:
        """The same run as another rank than 0 saw it, whose reports are not in storage."""
        assert self._view is not None
        return Result._of_run(self._place, replace(self._view, metrics=metrics), self._reports)

    @functools.cached_property
    def metrics_dataframe(self) -> pandas.DataFrame | None:
        """A row for every report that counts, read from storage when it is first asked for. Nested metrics become
        columns `a/b`; `training_iteration` and `timestamp` are added where no metric has that name. None if there was
        no report."""
        from holdfast.control.view import read_reports

        store = self._place._open()
        rows = read_reports(store) if self._reports is None else self._reports
        if not rows:
            if self.metrics is not None and not store.children():
                raise NotFound(f"This machine does not see {self.path}, where the reports of the run are.")
            return None
        try:
            import pandas
        except ModuleNotFoundError:
            raise MissingExtra("Result.metrics_dataframe needs pandas; run: pip install pandas") from None
        return pandas.DataFrame(
            [{"training_iteration": row.iteration, "timestamp": row.at, **flatten_metrics(row.metrics)} for row in rows]
        )

    @property
    def config(self) -> dict[str, Any] | None:
        """What the run was configured with, as params.json has it."""
        return self._view.params if self._view is not None else None

    @functools.cached_property
    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """The `CheckpointConfig(num_to_keep)` best checkpoints (all, if that is None) with their metrics: the best
        last, or the newest where no score was named. The newest of all is kept besides: `checkpoint` is that one."""
        view = self._view
        assert view is not None
        found = self._ranked(view.score_attribute, view.score_order)
        return found[-view.num_to_keep :] if view.num_to_keep is not None else found

    def get_best_checkpoint(self, metric: str, mode: Literal["max", "min"]) -> Checkpoint:
        """The checkpoint with the highest (`"max"`) or lowest (`"min"`) value of `metric`; nested ones are `a/b`."""
        if mode not in ("max", "min"):
            raise ValueError(f'Unsupported mode: {mode!r}. Please choose from "max" and "min".')
        found = self._ranked(metric, mode)
        if not found:
            raise RuntimeError("No checkpoint exists in the run directory!")
        if not any(metric in flatten_metrics(metrics) for _, metrics in found):
            names = sorted({name for _, metrics in found for name in flatten_metrics(metrics)})
            raise RuntimeError(f"Invalid metric name {metric!r}! You may choose from: {names}.")
        return found[-1][0]

    def _ranked(self, attribute: str | None, order: Literal["max", "min"]) -> list[tuple[Checkpoint, dict[str, Any]]]:
        rule = RetentionRule(score_attribute=attribute, score_order=order)
        if self._view is not None:
            stored = ranked(self._view.checkpoints, rule)
            return [(_handle(self._place, one.name), dict(one.metrics)) for one in stored]
        given = self.best_checkpoints or []
        numbered = [
            StoredCheckpoint(name=str(at), index=at, iteration=at, generation=0, metrics=metrics)
            for at, (_, metrics) in enumerate(given)
        ]
        return [given[one.index] for one in ranked(numbered, rule)]

    # ------------------------------------------------------------------ where

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


def _has_params(store: Store) -> bool:
    """Whether this is a trial's directory, which has no run.json."""
    try:
        store.size("params.json")
    except NotFound:
        return False
    return True


def _decoded(value: Any) -> Any:
    """The return value as it was; None, with a warning, where this process cannot make it."""
    from holdfast.worker.return_value import decode_value

    try:
        return decode_value(value)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        warnings.warn(f"The return value of the run cannot be read, so it is None: {error}", stacklevel=4)
        return None


def _handle(place: Checkpoint, name: str) -> Checkpoint:
    """The checkpoint of this name in the run's directory."""
    if place._custom is not None:
        return Checkpoint(join(place._given, name), place._custom)
    return Checkpoint._from_store(place._open(), name)

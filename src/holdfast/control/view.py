"""A run as its directory has it: what `Result` shows.

`read_run` folds the journal without writing anything, so it works on read-only storage, on a run that is going on, and
on one whose controller died. Of a trial, which has no journal in its directory, it reads the copies there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.checkpoint.catalog import Catalog
from holdfast.control.failures import run_error
from holdfast.control.history import read_history, read_records
from holdfast.core import records as r
from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.curve import effective_reports
from holdfast.errors import NotFound, TrainingFailedError
from holdfast.storage.store import Store

__all__ = ["RunView", "read_reports", "read_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """All of it but the reports, of which there may be millions: `read_reports` gives those."""

    metrics: dict[str, Any] | None = None
    """The last report that counts; None if there is none."""
    checkpoints: list[StoredCheckpoint] = field(default_factory=list)
    """The committed ones since the run's last restart that retention has not removed, ascending by iteration."""
    return_value: Any = None
    error: TrainingFailedError | None = None
    """What `fit()` raised, or would have."""
    params: dict[str, Any] | None = None
    """What params.json holds."""
    score_attribute: str | None = None
    num_to_keep: int | None = None
    score_order: Literal["max", "min"] = "max"
    """By what the run ranks its checkpoints (`CheckpointConfig`)."""


def read_run(store: Store) -> RunView:
    """Look at the run whose directory is the store's root."""
    history = read_history(store)
    summary, rows = history.summary, [] if history.exists else _result_rows(store)
    error = None if history.exists else _error_file(store)
    outcome, started = summary.durable.outcome, summary.started
    return RunView(
        metrics=rows[-1] if rows else summary.curve.last.metrics,
        checkpoints=[
            summary.durable.with_validation(one.stored)
            for one in Catalog(store).committed()
            if one.index >= summary.durable.first_index
        ],
        return_value=outcome.return_value if isinstance(outcome, r.RunFinished) else None,
        error=run_error(outcome, store.uri) if isinstance(outcome, r.RunFailed) else error,
        params=_params(store),
        score_attribute=started.score_attribute if started else None,
        num_to_keep=started.num_to_keep if started else None,
        score_order="min" if started and started.score_order == "min" else "max",
    )


def read_reports(store: Store) -> list[r.Reported]:
    """Every report that counts, in order of iteration: those of work that was lost and done again are left out."""
    try:
        return effective_reports(read_records(store))
    except NotFound:
        return [
            r.Reported(
                at=row.get("timestamp", 0), generation=0, iteration=row.get("training_iteration", 0), metrics=row
            )
            for row in _result_rows(store)
        ]


def _result_rows(store: Store) -> list[dict[str, Any]]:
    """The reports that result.json has: of a trial, whose journal is its experiment's, that is all there is in its own
    directory."""
    try:
        data = store.get("result.json")
    except NotFound:
        return []
    rows: list[dict[str, Any]] = []
    for line in data.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # the last one, torn by a crash: it will be written again
    return rows


def _error_file(store: Store) -> TrainingFailedError | None:
    """What error.txt says, which there is only of a run that failed and did not go on."""
    try:
        text = store.get("error.txt").decode(errors="replace")
    except NotFound:
        return None
    kind, _, message = text.rstrip().partition(": ")
    return TrainingFailedError(f"Training failed: {message or kind}")


def _params(store: Store) -> dict[str, Any] | None:
    try:
        found = json.loads(store.get("params.json"))
    except (NotFound, ValueError):
        return None
    return found if isinstance(found, dict) else None

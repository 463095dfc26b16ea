"""A run as its directory tells it: what `Result` and the command line show.

`read_run` folds the journal without writing anything, so it works on read-only storage, on a run that is
going on, and on one whose controller died.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CheckpointView", "ErrorView", "FailureView", "ReportView", "RunView"]


@dataclass(frozen=True, slots=True)
class ReportView:
    """One report that counts: those of work that was lost and done again are left out."""

    iteration: int
    time: float
    """Seconds since 1970."""
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One committed checkpoint that retention has not removed."""

    name: str
    index: int
    iteration: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FailureView:
    """How one rank failed: the exception's class name, its text, and its traceback where there was one."""

    type: str
    message: str
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorView:
    """Why the run failed for good."""

    message: str
    worker_failures: dict[int, FailureView] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """All of it. `reports` and `checkpoints` ascend by iteration."""

    status: Literal["running", "finished", "failed", "interrupted"]
    reports: list[ReportView] = field(default_factory=list)
    checkpoints: list[CheckpointView] = field(default_factory=list)
    return_value: Any = None
    error: ErrorView | None = None
    params: dict[str, Any] | None = None
    """What params.json holds."""
    score_attribute: str | None = None
    score_order: Literal["max", "min"] = "max"
    """By what the run ranks its checkpoints (`CheckpointConfig`)."""
    recoveries: int = 0
    goodput: float | None = None
    """Share of the wall time spent on training that was kept, 0 to 1."""

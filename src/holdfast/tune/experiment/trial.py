"""`Trial`: one configuration that is tried, as schedulers, callbacks and results see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

__all__ = ["Trial"]


@dataclass(eq=False, repr=False)
class Trial:
    """Made and kept up to date by the experiment. Two trials are the same only if they are one object."""

    PENDING: ClassVar[str] = "PENDING"
    RUNNING: ClassVar[str] = "RUNNING"
    PAUSED: ClassVar[str] = "PAUSED"
    TERMINATED: ClassVar[str] = "TERMINATED"
    ERROR: ClassVar[str] = "ERROR"

    trial_id: str
    config: dict[str, Any] = field(default_factory=dict)
    status: str = "PENDING"
    last_result: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    """Name of the newest checkpoint that is committed."""
    path: str = ""
    """Its directory in storage."""
    error: Exception | None = None
    """Why it failed for good."""

    def is_finished(self) -> bool:
        return self.status in (Trial.TERMINATED, Trial.ERROR)

    def __str__(self) -> str:
        return self.trial_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.trial_id}, {self.status}>"

"""What the user asked of a run, reduced to what its decisions depend on."""

from __future__ import annotations

import msgspec

from holdfast.core.backoff import backoff_s
from holdfast.core.retention import RetentionRule

__all__ = ["RunSpec"]


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the machine."""

    workers_min: int
    workers_max: int
    max_failures: int = 0
    """Failures that are survived; -1 is any number."""
    max_preemption_failures: int = -1
    """Losses of nodes that were being drained that are survived; -1 is any number."""
    stop_on_repeated_error: bool = True
    """An error of the user's code that comes twice in the same way ends the run, whatever `max_failures` allows."""
    progress_timeout_s: float | None = None
    """A generation in which nothing is reported for so long is taken for hung."""
    agents_timeout_s: float = 600.0
    """How long to wait for enough agents before the run fails."""
    last_call_s: float = 0.0
    """How long a run that waited for agents, and has enough, waits for more before it starts."""
    spares: int = 0
    """So many agents beyond those that the largest world needs are kept prepared and idle."""
    resize_settle_s: float = 60.0
    """For how long there is room for a larger generation before one is planned: what joins meanwhile is one change."""
    backoff_base_s: float = 1.0
    backoff_max_s: float = 60.0
    target_overhead: float = 0.02
    """Share of the time that checkpoints may stall training when `should_checkpoint` decides."""
    catch_up_s: float = 2.0
    """How long after its last report a rank that raised an exception lets the other ranks make that report too."""
    lag_warning_s: float = 30.0
    """After how long ranks that have not reported are named when a checkpoint waits for them."""
    has_validation: bool = False
    """There is a function that validates checkpoints."""
    has_callbacks: bool = False
    """The user's callbacks are given what every rank reports, and the run finishes after they have returned."""
    retention: RetentionRule = RetentionRule()

    def backoff_s(self, failures: int) -> float:
        """How long to wait after so many failures in a row."""
        return backoff_s(failures, self.backoff_base_s, self.backoff_max_s)

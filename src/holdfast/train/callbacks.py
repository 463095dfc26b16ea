"""`UserCallback`: the user's own code, called by the controller in the driver's process while a run goes on.

Derive from it, override what is needed, and give instances to `RunConfig(callbacks=[...])`. The controller
(`holdfast.control`) calls the hooks in order, one at a time, in a thread of their own. An exception in a hook ends the
run: `fit()` raises `ControllerError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.handle import Checkpoint
    from holdfast.control.request import RunContext

__all__ = ["UserCallback"]


class UserCallback:
    """Every hook does nothing until it is overridden."""

    def after_run_start(self, run_context: RunContext) -> None:
        """The controller holds the run; no worker has started yet."""

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """Every rank has made a report. `metrics` has one dict for each, in the order of ranks; `checkpoint` is the one
        that ranks gave with it, committed."""

    def after_exception(self, run_context: RunContext, worker_exceptions: dict[int, Exception]) -> None:
        """Workers failed, by rank; whether the run goes on is decided afterwards."""

    def _run_stands_at(self, run_context: RunContext, iteration: int) -> None:
        """For callbacks of Holdfast's own: the reports up to this one count, and the next one will be the one after
        it: workers are about to start, or the run is complete and no other hook is called."""

    def _before_report(self, run_context: RunContext, iteration: int) -> None:
        """For callbacks of Holdfast's own: the number of the report that `after_report` is about to be called for. One
        whose checkpoint is still on its way to storage comes later than those after it."""

    def after_run_end(self, run_context: RunContext, status: str) -> None:
        """The run is over: "finished", "failed" or "interrupted". An exception in here is only logged."""

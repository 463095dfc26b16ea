"""XGBoost's collective around a training function: rank 0 runs the tracker, every rank joins it.

`XGBoostTrainer` sends this to the workers as their framework; `worker.bootstrap` calls `setup` and `shutdown`.
"""

from __future__ import annotations

import sys
from typing import Any

from holdfast.worker.bootstrap import release_port
from holdfast.worker.job import Assignment
from holdfast.worker.session import current

__all__ = ["XGBoostCollective"]


class XGBoostCollective:
    """A `Framework` (see `holdfast.worker.job`): one rabit group over all workers, with the ranks of the run."""

    def __init__(self) -> None:
        self._tracker: Any = None
        self._context: Any = None

    def setup(self, assignment: Assignment, master_listen_fd: int | None) -> None:
        if master_listen_fd is not None:
            release_port(master_listen_fd)  # the tracker chooses a port of its own
        if assignment.world_size == 1:
            return
        from xgboost.collective import CommunicatorContext

        arguments = self._start_tracker(assignment) if assignment.rank == 0 else None
        arguments = current().broadcast_from_rank_zero(arguments)
        # The tracker gives out ranks in the order of these ids.
        self._context = CommunicatorContext(**arguments, dmlc_task_id=f"rank-{assignment.rank:08}")
        self._context.__enter__()

    def _start_tracker(self, assignment: Assignment) -> dict[str, Any]:
        from xgboost.tracker import RabitTracker

        self._tracker = RabitTracker(assignment.world_size, assignment.master_address, sortby="task")
        self._tracker.start()
        return dict(self._tracker.worker_args())

    def shutdown(self) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)
        if self._tracker is not None and sys.exception() is None:
            # The tracker lives in this process, and the other ranks need it until they have left the group. After a
            # failure nobody is waited for: they may never leave.
            self._tracker.wait_for()

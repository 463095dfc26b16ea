"""Two small collectives that need no framework: they go through the controller, so they also work on one rank.

For a few bytes of coordination, not for tensors. `holdfast.worker.session` does the talking.
"""

from __future__ import annotations

from typing import TypeVar

from holdfast.worker.session import current

__all__ = ["barrier", "broadcast_from_rank_zero"]

_T = TypeVar("_T")


def barrier() -> None:
    """Wait until every worker has called this."""
    current("train.collective.barrier()").barrier()


def broadcast_from_rank_zero(data: _T) -> _T:
    """Give rank 0's `data` to every worker; what the others pass is ignored.

    Anything that can be pickled; only workers of the run open it.
    """
    answer: _T = current("train.collective.broadcast_from_rank_zero()").broadcast_from_rank_zero(data)
    return answer

"""`PreemptionInfo`: which nodes are about to be taken away. Nothing tells yet, so `get_preemption_info` is None."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PreemptionInfo"]


@dataclass(frozen=True)
class PreemptionInfo:
    """`deadline_ms` is when the first of the nodes goes, in milliseconds since 1970, where that is known."""

    deadline_ms: int | None
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})

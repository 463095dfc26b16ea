"""`PreemptionInfo`: which nodes are about to be taken away, as users see it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.records import Preemption

__all__ = ["PreemptionInfo", "preemption_info"]


@dataclass(frozen=True)
class PreemptionInfo:
    """`deadline_ms` is when the first of the nodes goes, in milliseconds since 1970, where that is known. Nodes have
    the names of their agents."""

    deadline_ms: int | None
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})


def preemption_info(found: Preemption) -> PreemptionInfo:
    deadline_ms = None if found.deadline is None else int(found.deadline * 1000)
    return PreemptionInfo(deadline_ms, {agent: list(ranks) for agent, ranks in found.ranks.items()})

"""Barriers, broadcasts and questions to the controller that all ranks of a generation ask at once.

They exist for the odd small agreement between ranks (`train.collective`), not for tensors: frameworks bring their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.wire.messages import Collect, Collected, CollectiveKind

__all__ = ["Answer", "Collectives"]


Answer = Callable[[CollectiveKind, Any], Any]
"""From a collective's kind and rank 0's data to what every rank gets."""


@dataclass(slots=True)
class _Gathering:
    kind: CollectiveKind
    ranks: set[int] = field(default_factory=set)
    data: Any = None


class Collectives:
    """One generation's open collectives. A new generation begins with none."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._generation = 0
        self._world_size = 0
        self._open: dict[int, _Gathering] = {}

    def begin(self, generation: int, world_size: int) -> None:
        self._generation, self._world_size = generation, world_size
        self._open.clear()

    def arrive(self, message: Collect) -> Collected | None:
        """One rank arrived; the answer for everybody once all have."""
        if message.generation != self._generation:
            return None
        gathering = self._open.setdefault(message.sequence, _Gathering(message.kind))
        gathering.ranks.add(message.rank)
        if message.rank == 0:
            gathering.data = message.data
        if len(gathering.ranks) < self._world_size:
            return None
        del self._open[message.sequence]
        data = self._answer(gathering.kind, gathering.data)
        return Collected(generation=message.generation, sequence=message.sequence, data=data)

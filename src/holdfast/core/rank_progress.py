"""How far the ranks of a generation have come, kept so that an event costs the same however many ranks there are.

`LowestCount` knows the smallest number of reports, `Silence` who has been silent for longest. Both rely on what holds
in a generation: counts and times only grow. `core.invariants` compares them with a scan over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["LowestCount", "Silence"]


class LowestCount:
    """The smallest number of reports among some ranks; ranks may leave."""

    __slots__ = ("_ranks_at", "lowest")

    def __init__(self, ranks: int) -> None:
        """So many ranks, none of which has reported."""
        self._ranks_at = {0: ranks}
        """How many ranks have made each number of reports."""
        self.lowest: int | None = 0
        """None when every rank has left."""

    def move(self, before: int, after: int) -> None:
        """A rank that had made `before` reports has made `after`, which is more."""
        self._ranks_at[after] = self._ranks_at.get(after, 0) + 1
        self.leave(before)

    def leave(self, count: int) -> None:
        """A rank that has made `count` reports does not count any more."""
        left = self._ranks_at[count] - 1
        if left:
            self._ranks_at[count] = left
        else:
            del self._ranks_at[count]
            if count == self.lowest:
                self.lowest = min(self._ranks_at, default=None)


class Silence:
    """When each rank last made progress, and which ranks that are watched have been silent for longest.

    Watched are ranks that have reported, or all while none of them has. Ranks that wait or have finished are not among
    them. The ranks are held in the order of their last reports, so the first has been silent for longest.
    """

    __slots__ = ("_new", "_reported_at", "_reporting", "restarted_at")

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self.restarted_at = now
        """Nobody's silence counts from before this."""
        self._reported_at: dict[int, float] = {}
        self._new = dict.fromkeys(ranks, now)
        self._reporting: dict[int, float] = {}

    def report(self, rank: int, now: float) -> None:
        self._reported_at[rank] = now
        if self._new.pop(rank, None) is not None or self._reporting.pop(rank, None) is not None:
            self._reporting[rank] = now

    def restart(self, now: float) -> None:
        """Whatever kept ranks from reporting is over: every rank's silence counts from here."""
        self.restarted_at = now

    def ignore(self, rank: int) -> None:
        """The rank waits, or has finished."""
        self._new.pop(rank, None)
        self._reporting.pop(rank, None)

    def watch(self, rank: int, now: float) -> None:
        """The rank waits no more; its silence counts from here."""
        self.ignore(rank)
        (self._reporting if rank in self._reported_at else self._new)[rank] = now

    def since(self, rank: int) -> float:
        """Since when this rank, watched or not, has been silent."""
        return max(self._reported_at.get(rank, self.restarted_at), self.restarted_at)

    @property
    def longest_since(self) -> float | None:
        """Since when the rank has been silent that has been so for longest; None: nobody is watched."""
        watched = self._reporting or self._new
        return max(next(iter(watched.values())), self.restarted_at) if watched else None

    @property
    def longest(self) -> list[int]:
        """The ranks that have been silent for longest."""
        watched, since = self._reporting or self._new, self.longest_since
        return [rank for rank, at in watched.items() if max(at, self.restarted_at) == since]

"""Telling an agent that no longer answers from a controller that stood still itself.

A controller that is stopped (Ctrl+Z, a VM's pause) or kept waiting hears nothing, and that says nothing about anybody
else. So an agent is silent only when a number of pings went unanswered which were sent at regular intervals while this
process's event loop ran on time; and after a gap of its own, all waiting begins anew. `agent_pool` counts, `loop` tells
the core (`ControllerStalled`) that its timeouts must not count the gap.
"""

from __future__ import annotations

__all__ = ["LoopWatch"]

_SHORTEST_INTERVAL_S = 0.25


class LoopWatch:
    """Measures the gaps between looks at the clock. Somebody must look every `interval_s`."""

    def __init__(self, shortest_timeout_s: float, now: float) -> None:
        """`shortest_timeout_s` is the shortest of the timeouts that must not count this process's own gaps."""
        self.interval_s = max(_SHORTEST_INTERVAL_S, shortest_timeout_s / 4)
        self._looked_at = now

    def stalled_s(self, now: float) -> float:
        """How long the event loop stood still since the last look; 0 where it ran on time."""
        gap_s, self._looked_at = now - self._looked_at, now
        return gap_s if gap_s > 2 * self.interval_s else 0.0

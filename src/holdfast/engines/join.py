"""The engine of agents that join by themselves: started by hand, by a batch system, or by anything else.

It starts and ends nothing. `holdfast agent --join ADDRESS` on any machine makes an agent that connects to the hub, and
is told to end with it. Until enough have come, runs wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.admission import Gang
from holdfast.engines.engine import ControllerEndpoint, OnChange

__all__ = ["JoinEngine"]


class JoinEngine:
    """Takes whoever knows the run secret."""

    def __init__(self, endpoint: ControllerEndpoint, on_change: OnChange) -> None:
        """An agent is gone when its connection is, which the hub notices."""

    def want(self, gangs: Sequence[Gang]) -> None:
        """Somebody else starts them."""

    def knows(self, agent: str) -> bool:
        return True

    def abandon(self, agent: str) -> None:
        """Nothing was counted on."""

    def kill(self, agent: str) -> None:
        """Its process is another machine's: it ends by itself when it hears nothing any more."""

    async def close(self, flush_s: float) -> None:
        """The agents were told to end; nobody waits for other machines."""

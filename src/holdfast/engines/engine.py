"""The interface of engines. `local` starts agents on this machine; others will start them in a cluster.

An engine does not talk to agents: it starts them, and they connect to the controller by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Engine", "ControllerEndpoint", "OnGone"]

OnGone = Callable[[str, int, str], None]
"""Called with (agent, its slots, why) when an agent's process has ended, on the controller's event loop."""


@dataclass(frozen=True, slots=True)
class ControllerEndpoint:
    """The address of a controller, and the token that agents authenticate with."""

    address: str
    token: str = field(repr=False)


class Engine(Protocol):
    """Starts agents. All methods are called on the controller's event loop and must not block it."""

    def start(self, slots: int) -> list[str]:
        """Begin to start agents with `slots` slots in all; returns their names. Raises `OSError` if none can be
        started."""
        ...

    def kill(self, agent: str) -> None:
        """Kill an agent that no longer answers, and its descendants. Unknown names are ignored."""
        ...

    async def close(self, flush_s: float) -> None:
        """Wait until every agent of this engine has ended; each was told to take at most `flush_s`."""
        ...

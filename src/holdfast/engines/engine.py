"""What the controller asks of an engine. `local` is the embedded one; others bring agents from a cluster.

An engine never talks to agents: it makes them exist, and they dial the controller by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Engine", "ControllerEndpoint", "OnGone"]

OnGone = Callable[[str, int, str], None]
"""Told (agent, its slots, why) when an agent's process is gone, from the controller's event loop."""


@dataclass(frozen=True, slots=True)
class ControllerEndpoint:
    """Where agents find their controller, and how they prove that they may."""

    address: str
    token: str = field(repr=False)


class Engine(Protocol):
    """Brings agents. All methods are called from the controller's event loop and must not block it."""

    def start(self, slots: int) -> list[str]:
        """Begin to start agents with `slots` slots in all; returns their names. Raises `OSError` if none can be."""
        ...

    def kill(self, agent: str) -> None:
        """End an agent that no longer answers, and everything below it. Unknown names are ignored."""
        ...

    async def close(self, flush_s: float) -> None:
        """Return when every agent that this engine started is gone; each was told to take `flush_s` at most."""
        ...

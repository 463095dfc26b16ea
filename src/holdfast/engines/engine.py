"""The interface of engines. `local` starts agents on this machine; others will start them in a cluster.

An engine does not talk to agents: it starts them, and they connect to the hub by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Engine", "ControllerEndpoint", "OnGone"]

OnGone = Callable[[str, str], None]
"""Called with (agent, why) when an agent's process has ended, on the hub's event loop."""


@dataclass(frozen=True, slots=True)
class ControllerEndpoint:
    """The address of a controller, and the token that agents authenticate with."""

    address: str
    token: str = field(repr=False)


class Engine(Protocol):
    """Starts agents. All methods are called on the hub's event loop and must not block it."""

    def start(self, agent: str, slots: int) -> None:
        """Begin to start an agent of this name with so many slots. Raises `OSError` if that cannot be done."""
        ...

    def kill(self, agent: str) -> None:
        """Kill an agent that no longer answers, and its descendants. Unknown names are ignored."""
        ...

    async def wait_ended(self, agents: Collection[str], flush_s: float) -> None:
        """Wait until these agents have ended; each was told to take at most `flush_s`, and is killed if it takes much
        longer. Unknown names are ignored."""
        ...

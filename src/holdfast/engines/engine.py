"""The interface of engines. `local` starts agents on this machine, `ray` on the nodes of a Ray cluster, `join`
waits for those that somebody else starts.

An engine does not talk to agents: it starts them, and they connect to the hub by themselves. It is told the level, not
the change: `want` says for which gangs there must be room now, and the engine compares that with what it has. It
reports agents as pending, draining and gone; that they have joined, the hub sees by itself. That nothing has come yet
is no failure: an agent may be pending for as long as it takes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase

__all__ = ["AgentChange", "ControllerEndpoint", "Engine", "EngineName", "MakeEngine", "OnChange"]


class EngineName(enum.StrEnum):
    """The engines that a run can ask for (`ScalingConfig(engine=...)`)."""

    LOCAL = "local"
    """Agents are started on this machine."""
    JOIN = "join"
    """Agents join by themselves."""
    RAY = "ray"
    """Agents are started on the nodes of a Ray cluster."""


class AgentChange(NamedTuple):
    """An agent has come to another phase."""

    agent: str
    phase: AgentPhase
    why: str = ""
    """For people: how it ended, or why it is taken away."""
    deadline_s: float | None = None
    """Of an agent that is draining: it is gone in so many seconds; None: it stays until its workers have moved."""


OnChange = Callable[[AgentChange], None]
"""Called on the hub's event loop."""


@dataclass(frozen=True, slots=True)
class ControllerEndpoint:
    """The address of a controller, and the run secret that agents authenticate with."""

    address: str
    secret: str = field(repr=False)


class Engine(Protocol):
    """Starts agents. All methods are called on the hub's event loop and must not block it."""

    def want(self, gangs: Sequence[Gang]) -> None:
        """Have agents that could hold each of these gangs if it were alone; what is missing is begun to be started.
        May be said again and again. Raises `OSError` if an agent cannot be started."""
        ...

    def knows(self, agent: str) -> bool:
        """Whether an agent of this name belongs to this engine: it has started it, and it has not ended."""
        ...

    def abandon(self, agent: str) -> None:
        """The agent is lost, though its process may live on for a while: it does not count any more."""
        ...

    def kill(self, agent: str) -> None:
        """Kill an agent that no longer answers, and its descendants. Unknown names are ignored."""
        ...

    async def close(self, flush_s: float) -> None:
        """Wait until all agents have ended; each was told to take at most `flush_s`, and is killed if it takes much
        longer."""
        ...


MakeEngine = Callable[[ControllerEndpoint, OnChange], Engine]

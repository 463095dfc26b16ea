"""How far an agent has come, as engines report it and people see it.

An engine that waits for an autoscaler has agents that are pending for minutes, which is no failure; one that hears of a
preemption has agents that are draining.
"""

from __future__ import annotations

import enum

__all__ = ["AgentPhase"]


class AgentPhase(enum.StrEnum):
    """Phases only go forward, but an agent may skip some."""

    PENDING = "pending"
    """It was asked for, and has not connected yet."""
    JOINED = "joined"
    """It is connected, and its resources may be used."""
    DRAINING = "draining"
    """It goes on with what it has and gets nothing new; it may end at its deadline."""
    GONE = "gone"
    """Its process or its connection has ended."""

"""What every frame between controller and agent carries around its message: the run, the agent, and two numbers.

One connection serves any number of runs: the receiver routes each message by its run. Messages about the connection
itself have the run "" and the number 0; they are lost with it. All others are numbered from 1 in each direction, for as
long as the agent is known to the controller, over any number of connections (`wire.resumable_channel`).
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from holdfast.errors import WireError

__all__ = ["Envelope", "Stamp"]

_M = TypeVar("_M")


class Envelope(msgspec.Struct, Generic[_M], frozen=True, array_like=True):
    """One message, with its run and its agent."""

    run: str
    agent: str
    sequence: int
    """Its number in this direction; 0: it is of this connection only."""
    acknowledged: int
    """The number of the last message that the sender has received."""
    message: _M


class Stamp:
    """Makes the envelopes of one connection, and checks that those of the other side name its agent."""

    def __init__(self, agent: str) -> None:
        self.agent = agent

    def wrap(self, message: Any, run: str, sequence: int = 0, acknowledged: int = 0) -> Envelope[Any]:
        return Envelope(run, self.agent, sequence, acknowledged, message)

    def check(self, envelope: Envelope[Any]) -> None:
        """Raise `WireError` unless it names the agent of this connection."""
        if envelope.agent != self.agent:
            raise WireError(f"It sent a message of agent {envelope.agent!r} on the connection of {self.agent!r}.")

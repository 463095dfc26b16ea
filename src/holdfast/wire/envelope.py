"""What every frame between controller and agent carries around its message: the run, the agent, and a number.

The connection stamps and checks it (`wire.channel`); nobody else makes one. The numbers of each direction count from 1
for each connection, so a lost or repeated message is noticed where it arrives. One connection serves any number of
runs: the receiver routes each message by its run. Messages about the connection itself have the run "".
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from holdfast.errors import WireError

__all__ = ["Envelope", "Stamp"]

_M = TypeVar("_M")


class Envelope(msgspec.Struct, Generic[_M], frozen=True, array_like=True):
    """One message, with its run, its agent and its number in this direction of the connection."""

    run: str
    agent: str
    sequence: int
    message: _M


class Stamp:
    """Makes the envelopes of one side of a connection, and checks those of the other."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self._sent = 0
        self._received = 0

    def wrap(self, message: Any, run: str) -> Envelope[Any]:
        """The message in the next envelope."""
        self._sent += 1
        return Envelope(run, self.agent, self._sent, message)

    def check(self, envelope: Envelope[Any]) -> None:
        """Raise `WireError` unless this is the other side's next envelope."""
        if envelope.agent != self.agent:
            raise WireError(f"It sent a message of agent {envelope.agent!r} on the connection of {self.agent!r}.")
        self._received += 1
        if envelope.sequence != self._received:
            raise WireError(f"It sent message {envelope.sequence} where message {self._received} comes next.")

"""One connected agent, as the controller sees it: its channel, and whether it still answers."""

from __future__ import annotations

import asyncio

import msgspec

from holdfast.wire import messages as m
from holdfast.wire.channel import Channel

__all__ = ["FUNCTION_PIECE_BYTES", "AgentLink"]

FUNCTION_PIECE_BYTES = 1024 * 1024


class AgentLink:
    """An agent that has sent `AgentJoined`."""

    def __init__(self, channel: Channel[m.AgentMessage], name: str) -> None:
        self._channel = channel
        self.name = name
        self.gone = asyncio.Event()
        self.unanswered_pings = 0
        """Sent since this agent last sent anything."""

    def send(self, message: m.ControllerMessage) -> None:
        self._channel.send_nowait(message)

    async def send_job(self, prepare: m.Prepare) -> None:
        """Send `prepare`, its function in pieces, no faster than the agent takes them: pings go in between."""
        function = memoryview(prepare.function)
        first = bytes(function[:FUNCTION_PIECE_BYTES])
        await self._channel.send(msgspec.structs.replace(prepare, function=first))
        for start in range(FUNCTION_PIECE_BYTES, len(function), FUNCTION_PIECE_BYTES):
            piece = bytes(function[start : start + FUNCTION_PIECE_BYTES])
            await self._channel.send(m.FunctionPiece(data=piece))

    def abort(self) -> None:
        """End the connection at once."""
        self._channel.abort()

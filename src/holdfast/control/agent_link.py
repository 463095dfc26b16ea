"""One agent that has joined, as the controller sees it: its channel, and whether it still answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.control.working_dir import PackedDirectory
from holdfast.wire import messages as m
from holdfast.wire.frames import encode_body
from holdfast.wire.resumable_channel import ResumableChannel

__all__ = ["FUNCTION_PIECE_BYTES", "AgentLink", "Preparation", "send_all"]

FUNCTION_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Preparation:
    """What an agent is sent before it can start workers of a run."""

    function: m.PrepareFunction
    run: m.PrepareRun
    code: PackedDirectory | None = None
    """The driver's working directory, for agents that do not share its disk."""


class AgentLink:
    """An agent that has sent `AgentJoined` and is not lost, whether or not it is connected just now."""

    def __init__(self, channel: ResumableChannel[m.AgentMessage]) -> None:
        self.channel = channel
        self.name = channel.agent
        self.gone = asyncio.Event()
        self.unanswered_pings = 0
        """Sent since this agent last sent anything."""
        self._sent: dict[str, asyncio.Task[None]] = {}
        """The sending of each function and working directory, by its key or hash. A run that ends meanwhile does not
        end it: others may wait for the same."""

    def send(self, message: m.ControllerMessage | msgspec.Raw, run: str = "") -> None:
        """Queue a message of a run, or of the agent itself."""
        self.channel.send_nowait(message, run)

    def ping(self, message: m.Ping | msgspec.Raw) -> None:
        """Ask for an answer; one that nobody sends is not waited for while there is no connection."""
        self.unanswered_pings += 1
        self.channel.signal(message)

    async def prepare(self, run: str, preparation: Preparation) -> None:
        """Prepare the agent for a run; code and a function that it has already are not sent again."""
        if (code := preparation.code) is not None:
            await self._send_once(code.hash, lambda: self._send_code(code))
        function = preparation.function
        await self._send_once(function.key, lambda: self._send_function(function))
        self.send(preparation.run, run)

    async def _send_once(self, key: str, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if key not in self._sent:
            self._sent[key] = asyncio.get_running_loop().create_task(send())
        await asyncio.shield(self._sent[key])

    async def _send_code(self, code: PackedDirectory) -> None:
        order = m.PrepareCode(hash=code.hash, size_bytes=len(code.archive), root=code.root)
        await self.channel.send(order)
        for start in range(0, len(code.archive), FUNCTION_PIECE_BYTES):
            piece = code.archive[start : start + FUNCTION_PIECE_BYTES]
            await self.channel.send(m.CodePiece(hash=code.hash, data=piece))

    async def _send_function(self, order: m.PrepareFunction) -> None:
        """Send a function in pieces, no faster than the agent takes them: pings go in between."""
        function = memoryview(order.function)
        first = bytes(function[:FUNCTION_PIECE_BYTES])
        await self.channel.send(msgspec.structs.replace(order, function=first))
        for start in range(FUNCTION_PIECE_BYTES, len(function), FUNCTION_PIECE_BYTES):
            piece = bytes(function[start : start + FUNCTION_PIECE_BYTES])
            await self.channel.send(m.FunctionPiece(key=order.key, data=piece))


def send_all(links: Collection[AgentLink], message: m.ControllerMessage, run: str = "") -> None:
    """Queue one message for several agents; it is encoded once."""
    sent = encode_body(message) if len(links) > 1 else message
    for link in links:
        link.send(sent, run)

"""One agent that has joined, as the controller sees it: its channel, and whether it still answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from holdfast.control.working_dir import PackedDirectory
from holdfast.wire import messages as m
from holdfast.wire.frames import encode_body
from holdfast.wire.resumable_channel import ResumableChannel

__all__ = ["FUNCTION_PIECE_BYTES", "AgentLink", "Preparation", "send_all"]

FUNCTION_PIECE_BYTES = 1024 * 1024
_REDIAL_S = 0.25
"""An agent whose connection is closed connects again at once, which takes 20 ms on a machine that is not busy."""
_ROUND_TRIPS = 8
"""More than connecting takes, with TLS and authentication."""
_FADING = 0.9


@dataclass(frozen=True)
class Preparation:
    """What an agent is sent before it can start workers of a run."""

    function: m.PrepareFunction
    run: m.PrepareRun
    code: PackedDirectory | None = None
    """The driver's working directory, for agents that do not share its disk."""

    @cached_property
    def encoded_run(self) -> msgspec.Raw:
        """Encoded once for all agents."""
        return encode_body(self.run)

    @cached_property
    def encoded_function(self) -> msgspec.Raw | None:
        """The same; None: it goes in pieces."""
        return encode_body(self.function) if len(self.function.function) <= FUNCTION_PIECE_BYTES else None

    @cached_property
    def encoded_code(self) -> tuple[msgspec.Raw, ...] | None:
        """The same of the working directory, which is announced first."""
        if self.code is None or len(self.code.archive) > FUNCTION_PIECE_BYTES:
            return None
        piece = m.CodePiece(hash=self.code.hash, data=self.code.archive)
        return encode_body(_announce(self.code)), encode_body(piece)


def _announce(code: PackedDirectory) -> m.PrepareCode:
    return m.PrepareCode(hash=code.hash, size_bytes=len(code.archive), root=code.root)


class AgentLink:
    """An agent that has sent `AgentJoined` and is not lost, whether or not it is connected just now."""

    def __init__(self, channel: ResumableChannel[m.AgentMessage]) -> None:
        self.channel = channel
        self.name = channel.agent
        self.gone = asyncio.Event()
        self.connections = 1
        """How many connections the channel has had."""
        self.unanswered_pings = 0
        """Sent since this agent last sent anything."""
        self._asked_at: float | None = None
        """When the first of the pings was sent that no `Pong` has followed yet, by the event loop's clock."""
        self._answer_s = 0.0
        """How long answers to pings take: the slowest of late."""
        self._sent: dict[str, asyncio.Task[None] | None] = {}
        """The sending of each function and working directory, by its key or hash; None: it was sent at once. A run
        that ends meanwhile does not end it: others may wait for the same."""

    def send(self, message: m.ControllerMessage | msgspec.Raw, run: str = "") -> None:
        """Queue a message of a run, or of the agent itself."""
        self.channel.send_nowait(message, run)

    def ping(self, message: m.Ping | msgspec.Raw) -> None:
        """Ask for an answer; one that nobody sends is not waited for while there is no connection."""
        self.unanswered_pings += 1
        if self._asked_at is None:
            self._asked_at = asyncio.get_running_loop().time()
        self.channel.signal(message)

    def answered(self) -> None:
        """A ping was answered."""
        if self._asked_at is not None:
            took_s = asyncio.get_running_loop().time() - self._asked_at
            self._answer_s = max(took_s, self._answer_s * _FADING)
            self._asked_at = None

    def redial_s(self) -> float | None:
        """How soon the agent is back if it lives, after its end of the connection was closed; None if it had not
        answered before that, so that the network may be in trouble."""
        wait_s = _REDIAL_S + _ROUND_TRIPS * self._answer_s
        if self._asked_at is not None and asyncio.get_running_loop().time() - self._asked_at > wait_s:
            return None
        return wait_s

    def prepare(self, run: str, preparation: Preparation) -> asyncio.Task[None] | None:
        """Prepare the agent for a run; code and a function that it has already are not sent again. None: all is sent
        already, otherwise by this task."""
        function, code = preparation.function, preparation.code
        if code is not None and code.hash not in self._sent and preparation.encoded_code is not None:
            self._sent[code.hash] = None
            for message in preparation.encoded_code:
                self.send(message)
        if code is None or self._was_sent(code.hash):
            if function.key not in self._sent and preparation.encoded_function is not None:
                self._sent[function.key] = None
                self.send(preparation.encoded_function)
            if self._was_sent(function.key):
                self.send(preparation.encoded_run, run)
                return None
        return asyncio.get_running_loop().create_task(self._prepare(run, preparation))

    def _was_sent(self, key: str) -> bool:
        """Whether it was sent as a whole."""
        if key not in self._sent:
            return False
        task = self._sent[key]
        return task is None or (task.done() and not task.cancelled() and task.exception() is None)

    async def _prepare(self, run: str, preparation: Preparation) -> None:
        if (code := preparation.code) is not None:
            await self._send_once(code.hash, lambda: self._send_code(code))
        function = preparation.function
        await self._send_once(function.key, lambda: self._send_function(function))
        self.send(preparation.encoded_run, run)

    async def _send_once(self, key: str, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if key not in self._sent:
            self._sent[key] = asyncio.get_running_loop().create_task(send())
        if (task := self._sent[key]) is not None:
            await asyncio.shield(task)

    async def _send_code(self, code: PackedDirectory) -> None:
        await self.channel.send(_announce(code))
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

"""One connected agent, seen from the controller: its channel, and what its messages mean as events."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from holdfast.core import events as e
from holdfast.core.records import WorkerFailure
from holdfast.wire import messages as m
from holdfast.wire.channel import Channel

__all__ = ["FUNCTION_PIECE_BYTES", "AgentLink", "translate"]

FUNCTION_PIECE_BYTES = 1024 * 1024


class AgentLink:
    """An agent that said hello and was taken in."""

    def __init__(self, channel: Channel[m.AgentMessage], hello: m.AgentHello) -> None:
        self._channel = channel
        self.name = hello.agent
        self.host = hello.host
        self.address = hello.address
        self.slots = hello.slots
        self.master_port = hello.master_port
        self.gone = asyncio.Event()
        self.unanswered_pings = 0
        """Sent since this agent last said anything."""

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

    def cut(self) -> None:
        """End the connection without another word."""
        self._channel.abort()


def translate(message: Any, link: AgentLink) -> e.Event | None:
    """The event that a message amounts to; None if the core has no business with it."""
    match message:
        case m.Reports(generation=generation, rank=rank, reports=reports):
            return e.RankReported(generation=generation, rank=rank, items=tuple(reports))
        case m.Prepared():
            return e.AgentPrepared(agent=link.name)
        case m.Started():
            return e.WorkersStarted(generation=message.generation, agent=link.name)
        case m.DamageFound(generation=generation, checkpoint=checkpoint, why=why):
            return e.DamageFound(generation=generation, agent=link.name, checkpoint=checkpoint, why=why)
        case m.Waiting():
            return e.WorkerWaited(generation=message.generation, rank=message.rank, waiting=message.waiting)
        case m.Finished(generation=generation, rank=rank, value=value, value_error=value_error):
            return e.WorkerFinished(generation=generation, rank=rank, value=value, value_error=value_error)
        case m.Exited():
            return e.WorkerExited(generation=message.generation, failure=_failure(message, link))
        case m.Stopped():
            return e.WorkersStopped(generation=message.generation, agent=link.name)
        case _:
            return None


def _failure(message: m.Exited, link: AgentLink) -> WorkerFailure:
    return WorkerFailure(
        rank=message.rank,
        cause=message.cause,
        agent=link.name,
        host=link.host,
        kind=message.kind,
        damaged_checkpoint=message.damaged_checkpoint,
        error_type=message.error_type,
        error=message.error,
        traceback=message.traceback,
        signal=message.signal,
        last_lines=tuple(message.last_lines),
    )

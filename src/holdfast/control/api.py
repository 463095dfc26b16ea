"""The control API's server: answers the requests of control clients that connect to the hub's port.

Each connection is served by a task of its own, which waits whenever its client reads too slowly: no client can delay
the event loop, a run, or another client. What a request does to a run is in `run_control`; the messages are in
`wire.control_messages`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, Protocol

from holdfast.checkpoint.upload_locks import streamed_uploads
from holdfast.control.recent_logs import RecentLogs
from holdfast.wire import control_messages as cm
from holdfast.wire.channel import Channel
from holdfast.wire.envelope import Envelope
from holdfast.wire.messages import StorageServed

__all__ = ["ControlApi", "ControlledRun", "FindStorage"]

FindStorage = Callable[[str], Awaitable[StorageServed | cm.Refused]]
"""From a directory of this machine to where it is served."""

_LAST_LINES_S = 1.0
"""How long clients may take to read what is left when the hub ends."""


class ControlledRun(Protocol):
    """What control clients may do with a run."""

    @property
    def logs(self) -> RecentLogs | None:
        """None: there are none, and `answer` says so."""
        ...

    def answer(self, request: cm.RunRequest) -> cm.ControlReply:
        """Carry out any request, `ReadLogs` only where there are none. Must not block."""
        ...


class ControlApi:
    """The control clients of one hub, and the runs that they may ask about. Used from its event loop only."""

    def __init__(self, find_storage: FindStorage) -> None:
        self._find_storage = find_storage
        self._runs: dict[str, ControlledRun] = {}
        self._reading: set[asyncio.Task[None]] = set()
        """The tasks of clients that read logs."""

    def enter(self, run_id: str, run: ControlledRun) -> None:
        self._runs[run_id] = run

    def leave(self, run_id: str) -> None:
        """The run has ended; who follows its logs is told."""
        logs = self._runs.pop(run_id).logs
        if logs is not None:
            logs.close()

    async def serve(self, channel: Channel[cm.ControlRequest]) -> None:
        """One client's connection."""
        arriving = asyncio.ensure_future(channel.recv())
        uploads = ExitStack()
        try:
            while (envelope := await arriving) is not None:
                arriving = asyncio.ensure_future(channel.recv())
                if isinstance(envelope.message, cm.FindStorage):
                    uploads.enter_context(streamed_uploads(envelope.message.tokens))
                    await channel.send(await self._find_storage(envelope.message.root))
                else:
                    await self._answer(channel, envelope.run, envelope.message, arriving)
        finally:
            arriving.cancel()
            uploads.close()

    async def close(self) -> None:
        """Give clients a moment to read the last lines of runs that have ended."""
        if self._reading:
            await asyncio.wait(self._reading, timeout=_LAST_LINES_S)

    async def _answer(
        self,
        channel: Channel[cm.ControlRequest],
        run_id: str,
        request: cm.RunRequest,
        arriving: asyncio.Future[Envelope[cm.ControlRequest] | None],
    ) -> None:
        run = self._runs.get(run_id)
        if run is None:
            reason = f"This driver has no run {run_id!r} now: it is about to start, or has ended."
            await channel.send(cm.Refused(reason=reason), run_id)
        elif isinstance(request, cm.ReadLogs) and (logs := run.logs) is not None:
            reading = asyncio.ensure_future(_send_logs(channel, run_id, request, logs))
            self._reading.add(reading)
            try:
                # A client that follows, and hangs up or asks for something else, does not want more.
                ends: list[asyncio.Future[Any]] = [reading, arriving] if request.follow else [reading]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()
                self._reading.discard(reading)
                await asyncio.gather(reading, return_exceptions=True)
        else:
            await channel.send(run.answer(request), run_id)


async def _send_logs(channel: Channel[cm.ControlRequest], run_id: str, request: cm.ReadLogs, logs: RecentLogs) -> None:
    position = 0
    while True:
        batches, left_out, position = logs.read(position)
        for batch in batches:
            lines = [line for line in batch.lines if request.rank in (None, line.rank)]
            if lines or left_out:
                await channel.send(cm.LogLines(generation=batch.generation, lines=lines, left_out=left_out), run_id)
                await channel.drain()
            left_out = 0
        if not request.follow or (logs.is_closed and logs.read(position)[2] == position):
            break
        await logs.wait(position)
    await channel.send(cm.LogsEnded(), run_id)
    await channel.drain()

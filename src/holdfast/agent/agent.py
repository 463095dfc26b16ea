"""The agent: one per node, between the controller and the node's workers.

Holds the connection to the controller, the functions that workers run, and what all runs share; for each run a
`RunHost` carries the controller's commands out and sends it the run's events. What one run does, or is done to it,
changes no other. When the controller is gone, the workers are killed at once. Uploads that it had ordered are finished
first (`finish_uploads`), for at most HOLDFAST_LINGER_S; without any the agent ends at once, too.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Coroutine
from typing import Any

from holdfast.agent.function_memory import FunctionMemory
from holdfast.agent.platform import Platform
from holdfast.agent.run_host import RunHost
from holdfast.core.events import AgentJoined
from holdfast.runtime import current
from holdfast.wire.channel import Channel
from holdfast.wire.messages import (
    AgentMessage,
    CloseRun,
    ControllerMessage,
    FunctionPiece,
    Ping,
    Pong,
    PrepareFunction,
    PrepareRun,
    RunClosed,
    Shutdown,
)

__all__ = ["Agent"]

_RENEW_EVERY_S = 30.0
_LAST_WORD_S = 1.0
_PAUSE_BACKLOG_BYTES = 32 * 1024 * 1024


class Agent:
    """One agent. `run` returns when the controller is gone, or has sent `Shutdown`, and everything is cleaned up."""

    def __init__(self, agent_id: str, slots: int, platform: Platform) -> None:
        self._id = agent_id
        self._host = socket.gethostname()
        self._slots = slots
        self._platform = platform
        self._channel: Channel[ControllerMessage] | None = None
        self._end = asyncio.Event()
        self._error: BaseException | None = None
        self._told_to_end = asyncio.Event()
        self._controller_died = False
        self._flush_s = 0.0
        self._functions: dict[str, FunctionMemory] = {}
        """By key."""
        self._runs: dict[str, RunHost] = {}
        """By the run's id."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._draining = False

    async def run(self) -> None:
        self._snapshot_memory = self._platform.open_snapshot_memory()
        self._session = self._platform.open_session(self._id)
        self._platform.sweep_cache()
        self._spawners = self._platform.make_spawners(self._session)
        try:
            channel = await self._platform.connect(self._id)
            self._channel = channel
            try:
                await self._serve(channel)
            finally:
                await channel.close()
            if self._lingers:
                await self._linger()
        finally:
            await self._spawners.close()
            await asyncio.gather(*(run.close(self._flush_s) for run in self._runs.values()))
            for function in self._functions.values():
                function.close()
            self._session.remove()
        if self._error is not None:
            raise self._error

    def shut_down(self, flush_s: float = 30.0) -> None:
        """Ask `run` to end: kill everything now, then take up to `flush_s` to store logs and artifacts."""
        self._flush_s = max(self._flush_s, flush_s)
        self._told_to_end.set()
        self._end.set()

    def parent_died(self) -> None:
        """For SIGHUP, which the kernel sends when the thread that started this process ends. The connection ends with
        the last thread, and may have more to say until then."""
        asyncio.get_running_loop().call_later(_LAST_WORD_S, self._lose_controller)

    # ------------------------------------------------------------------ the connection

    async def _serve(self, channel: Channel[ControllerMessage]) -> None:
        try:
            self._address = self._platform.advertise or channel.local_host
            resources, gpus = self._platform.find_resources()
            self._send(
                AgentJoined(
                    agent=self._id,
                    host=self._host,
                    slots=self._slots,
                    resources=resources,
                    gpus=gpus,
                    address=self._address,
                    pid=current().pid(),
                )
            )
            self._spawn(self._receive_all(channel))
            self._spawn(self._renew_times())
            await self._end.wait()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._end_runs()

    async def _end_runs(self) -> None:
        """Kill all workers of all runs."""
        runs = list(self._runs.values())
        await asyncio.gather(*(run.cancel() for run in runs))
        if self._lingers:
            # The zygotes stay: should this process be killed, they remove what that leaves.
            await asyncio.gather(*(run.kill_workers() for run in runs))
        else:
            await self._spawners.close()
        for run in runs:
            run.release_workers()

    async def _receive_all(self, channel: Channel[ControllerMessage]) -> None:
        while (envelope := await channel.recv()) is not None:
            self._handle(envelope.run, envelope.message)
        self._lose_controller()

    def _handle(self, run: str, message: ControllerMessage) -> None:
        if isinstance(message, PrepareFunction):
            if message.key not in self._functions:
                self._functions[message.key] = FunctionMemory(message)
        elif isinstance(message, FunctionPiece):
            self._functions[message.key].add(message.data)
        elif isinstance(message, PrepareRun):
            self._prepare(run, message)
        elif isinstance(message, Ping):
            self._send(Pong())
        elif isinstance(message, Shutdown):
            self.shut_down(message.flush_s)
        elif isinstance(message, CloseRun):
            self._spawn(self._close_run(run, message.flush_s))
        elif (host := self._runs.get(run)) is not None:  # or it is closed already
            host.handle(message)

    def _prepare(self, run: str, order: PrepareRun) -> None:
        if run not in self._runs:
            self._runs[run] = RunHost(
                run,
                (self._id, self._host),
                self._platform,
                self._session.run(run),
                self._spawners,
                self._platform.make_buffers(order.workers, self._snapshot_memory),
                self._address,
                functools.partial(self._send, run=run),
                self._backlog_bytes,
                self._choose_death_signal,
                self._fail,
            )
        self._runs[run].prepare(order, self._functions[order.function_key])

    async def _close_run(self, run: str, flush_s: float) -> None:
        """End one run; nothing of it is left on this node afterwards."""
        if (host := self._runs.pop(run, None)) is not None:
            await host.cancel()
            await host.kill_workers()
            host.release_workers()
            await host.close(flush_s)
            self._choose_death_signal()
        self._send(RunClosed(), run)

    def _send(self, message: AgentMessage, run: str = "") -> None:
        channel = self._channel
        if channel is None:
            return
        channel.send_nowait(message, run)
        if channel.backlog_bytes > _PAUSE_BACKLOG_BYTES and not self._draining and not self._end.is_set():
            self._draining = True
            self._spawn(self._wait_for_controller(channel))

    def _backlog_bytes(self) -> int:
        return self._channel.backlog_bytes if self._channel is not None else 0

    async def _wait_for_controller(self, channel: Channel[ControllerMessage]) -> None:
        """Let workers wait in `report` while the controller lags, rather than fill this process's memory."""
        paused = [run.pause() for run in self._runs.values()]
        await channel.drain()
        self._draining = False
        for workers in paused:
            if workers is not None:
                workers.resume()

    # ------------------------------------------------------------------ the end

    def _lose_controller(self) -> None:
        """The connection ended without a `Shutdown`. Uploads that were ordered may still be finished; all else ends."""
        self._platform.outlive_controller()
        self._controller_died = True
        self._end.set()

    @property
    def _lingers(self) -> bool:
        """Whether uploads must be finished for a controller that died."""
        return (
            self._controller_died
            and self._platform.linger_s > 0
            and not self._told_to_end.is_set()
            and self._has_uploads
        )

    @property
    def _has_uploads(self) -> bool:
        return any(run.has_uploads for run in self._runs.values())

    def _choose_death_signal(self) -> None:
        self._platform.choose_death_signal(has_uploads=self._has_uploads)

    async def _linger(self) -> None:
        """Finish the uploads that were ordered, within the time limit, unless told to end."""
        self._platform.detach_output()
        finishing = asyncio.ensure_future(asyncio.gather(*(run.finish_uploads() for run in self._runs.values())))
        told = asyncio.ensure_future(self._told_to_end.wait())
        both: list[asyncio.Future[Any]] = [finishing, told]
        await asyncio.wait(both, timeout=self._platform.linger_s, return_when=asyncio.FIRST_COMPLETED)
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)

    async def _renew_times(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_EVERY_S)
            self._session.renew_times()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """An unexpected error ends the agent; the controller then handles the loss of the agent."""
        self._error = self._error or error
        self._end.set()

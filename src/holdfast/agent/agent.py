"""The agent: one per node, between the controller and the node's workers.

Holds the channel to the controller, the functions that workers run, and what all runs share; for each run a `RunHost`
carries the controller's commands out and sends it the run's events. What one run does, or is done to it, changes no
other. An agent that was started to come back connects again when its connection breaks, and goes on where it was. When
it hears nothing for its silence limit, or the controller does not know it any more, or when the only connection of
another agent ends, the controller is lost: the workers are killed at once. Uploads that it had ordered are finished
first (`finish_uploads`), for at most HOLDFAST_LINGER_S. Then an agent that comes back offers itself anew, with the
zygotes that it has; others end. An agent that is to be taken away tells the controller, and ends when its runs have
gone elsewhere (`Agent.drain`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.agent.code_directory import CodeDirectory
from holdfast.agent.function_memory import FunctionMemory
from holdfast.agent.platform import Platform
from holdfast.agent.run_host import RunHost
from holdfast.core.backoff import backoff_s
from holdfast.core.events import AgentDraining, AgentJoined
from holdfast.errors import HungUp, Unreachable, WireError
from holdfast.runtime import current
from holdfast.wire.liveness import LoopWatch
from holdfast.wire.messages import (
    AgentMessage,
    ChannelOpened,
    CloseRun,
    CodePiece,
    ControllerMessage,
    FunctionPiece,
    Leave,
    Ping,
    Pong,
    PrepareCode,
    PrepareFunction,
    PrepareRun,
    RunClosed,
    Shutdown,
)
from holdfast.wire.resumable_channel import ChannelRefusedError, ResumableChannel

__all__ = ["Agent"]

_RENEW_EVERY_S = 30.0
_LAST_WORD_S = 1.0
_PAUSE_BACKLOG_BYTES = 32 * 1024 * 1024
_RESUME_BACKLOG_BYTES = 4 * 1024 * 1024
_STOP_S = 2.0
"""How long before its deadline a draining agent begins to end, at most."""
_REDIAL_S = (0.1, 2.0)
"""The first pause between two attempts to connect again, and the longest."""
_HUNG_UP_S = (0.02, 0.3)
"""The shortest and the longest pause where too many agents dialled at once, which must not come back all at once."""
_HUNG_UP_PATIENCE_S = 10.0
"""For so long every agent dials again in that case: its controller is there."""
_log = logging.getLogger(__name__)


class Agent:
    """One agent. `run` returns when the controller has sent `Shutdown`, or is gone and the agent does not come back,
    and everything is cleaned up."""

    def __init__(self, agent_id: str, slots: int, platform: Platform) -> None:
        self._id = agent_id
        self._host = current().machine()[0]
        self._slots = slots
        self._platform = platform
        self._channel: ResumableChannel[ControllerMessage] | None = None
        self._end = asyncio.Event()
        """Set when the channel is over."""
        self._is_leaving = False
        """Whether the agent ends with this channel, although it was to come back."""
        self._heard = False
        self._error: BaseException | None = None
        self._told_to_end = asyncio.Event()
        self._controller_died = False
        self._controller_ended = False
        """Whether it has said that it ends, so that none is expected there for now."""
        self._flush_s = 0.0
        self._code: dict[str, CodeDirectory] = {}
        """Working directories of drivers, by hash."""
        self._functions: dict[str, FunctionMemory] = {}
        """By key."""
        self._runs: dict[str, RunHost] = {}
        """By the run's id."""
        self._closing: set[RunHost] = set()
        """Runs that the controller has ended, until nothing of them is left."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_serving = False
        """Whether there is a controller that the agent serves."""
        self._is_draining = False
        """Whether it ends as soon as its runs have gone elsewhere."""
        self._is_paused = False
        """Whether workers wait since the controller lags."""

    async def run(self) -> None:
        self._snapshot_memory = self._platform.open_snapshot_memory()
        self._session = self._platform.open_session(self._id)
        self._platform.sweep_cache()
        self._spawners = self._platform.make_spawners(self._session)
        try:
            channel = self._platform.make_channel(self._id)
            opened = await self._dial_first(channel)
            while opened is not None:
                await self._serve(channel, opened)
                if self._lingers:
                    await self._linger()
                if not self._comes_back:
                    break
                await self._forget_runs()
                channel = self._platform.make_channel(self._id)
                opened = await self._offer_again(channel)
        finally:
            await self._spawners.close()
            await asyncio.gather(*(run.close(self._flush_s) for run in self._hosts))
            for function in self._functions.values():
                function.close()
            self._session.remove()
        if self._error is not None:
            raise self._error

    def shut_down(self, flush_s: float = 30.0) -> None:
        """Ask `run` to end: kill everything now, then take up to `flush_s` to store logs and artifacts."""
        self._platform.end_by_itself()
        self._flush_s = max(self._flush_s, flush_s)
        self._told_to_end.set()
        self._is_leaving = True
        self._end.set()

    def drain(self, why: str, deadline_s: float) -> None:
        """End within `deadline_s`, as soon as the runs have gone elsewhere: the controller is told, and sends
        `Shutdown` when nothing of them is left here. With no controller to tell, and no run, end at once. Of two
        deadlines the earlier one counts."""
        if not self._is_serving:
            self.shut_down()
            return
        self._is_draining = True
        if self._is_cut_off:
            self.shut_down()
            return
        stop_s = min(_STOP_S, deadline_s / 5)
        _log.warning("%s: it ends when its runs have gone elsewhere, in %g s at the latest.", why, deadline_s)
        # For the controller it ends a little earlier, so that it is the one who stops the workers.
        self._send(AgentDraining(agent=self._id, why=why, deadline_s=deadline_s - stop_s))
        asyncio.get_running_loop().call_later(deadline_s - stop_s / 2, self.shut_down, stop_s / 2)

    @property
    def _is_cut_off(self) -> bool:
        """Whether there is nothing to wait for: no run is here, and no controller can send one or end the drain."""
        return not self._runs and (self._channel is None or not self._channel.is_connected)

    def dial_again(self) -> None:
        """Another driver may have taken over: do not wait until the one before is found silent."""
        if self._channel is not None and self._platform.follows_drivers:
            self._channel.disconnect()

    def parent_died(self) -> None:
        """For SIGHUP, which the kernel sends when the thread that started this process ends. The connection ends with
        the last thread, and may have more to say until then; not if that process was not the controller."""
        self._is_leaving = True
        is_controller = self._channel is None or not self._channel.comes_back
        asyncio.get_running_loop().call_later(_LAST_WORD_S if is_controller else 0.0, self._lose_controller)

    # ------------------------------------------------------------------ the connection

    async def _dial_first(self, channel: ResumableChannel[ControllerMessage]) -> ChannelOpened | None:
        """Connect for the first time; a controller that does not listen yet is waited for. None when told to end;
        raises `WireError`."""
        began, dial_s = asyncio.get_running_loop().time(), self._platform.dial_s

        def may_try_again(error: WireError, pause_s: float) -> bool:
            may_pass = isinstance(error, Unreachable) or self._platform.follows_drivers
            limit_s = max(dial_s, _HUNG_UP_PATIENCE_S) if isinstance(error, HungUp) else dial_s
            return may_pass and asyncio.get_running_loop().time() + pause_s <= began + limit_s

        return await self._dial(channel, may_try_again)

    async def _connect(self, channel: ResumableChannel[ControllerMessage]) -> ChannelOpened:
        """Connect, for the first time or again. Raises `WireError`, or `ChannelRefusedError` if that is no use."""
        return await channel.join(await self._platform.connect(self._id))

    async def _resume(self, channel: ResumableChannel[ControllerMessage]) -> bool:
        """Connect again, however often that fails; False if the controller does not know the channel any more. The end
        of the silence limit cancels this."""
        failures = 0
        while True:
            try:
                await self._connect(channel)
                return True
            except ChannelRefusedError as error:
                _log.warning("%s", error)
                return False
            except WireError as error:
                failures += 1
                await asyncio.sleep(_redial_pause_s(error, failures))

    async def _offer_again(self, channel: ResumableChannel[ControllerMessage]) -> ChannelOpened | None:
        """Connect as an agent that has no runs, however often that fails; None when told to end."""
        self._end.clear()
        self._controller_died = False
        if self._is_leaving:
            return None
        logged = ""

        def may_try_again(error: WireError, pause_s: float) -> bool:
            nonlocal logged
            is_expected = self._controller_ended and isinstance(error, Unreachable)
            if str(error) != logged and not is_expected:
                _log.warning("%s It is tried again.", logged := str(error))
            return True

        return await self._dial(channel, may_try_again)

    async def _dial(
        self, channel: ResumableChannel[ControllerMessage], may_try_again: Callable[[WireError, float], bool]
    ) -> ChannelOpened | None:
        """Connect, with pauses, as often as that fails and `may_try_again` with the next pause; None when told to
        end."""
        told = asyncio.ensure_future(self._end.wait())
        failures = 0
        try:
            while not told.done():
                dialing = asyncio.ensure_future(self._connect(channel))
                await asyncio.wait([dialing, told], return_when=asyncio.FIRST_COMPLETED)
                if told.done():
                    dialing.cancel()
                    await asyncio.gather(dialing, return_exceptions=True)
                    return None
                try:
                    return dialing.result()
                except WireError as error:
                    failures += 1
                    pause_s = _redial_pause_s(error, failures)
                    if not may_try_again(error, pause_s):
                        raise
                await asyncio.wait([told], timeout=pause_s)
            return None
        finally:
            told.cancel()

    async def _watch_silence(self, channel: ResumableChannel[ControllerMessage], silence_s: float) -> None:
        """Lose a controller that sends nothing for the limit; after half of it, try another connection, since one that
        lost packets for that long may take longer to notice that the network is back."""
        loop = asyncio.get_running_loop()
        watch = LoopWatch(silence_s, loop.time())
        limit = max(2, round(silence_s / watch.interval_s))
        silent = 0
        while silent < limit:
            await asyncio.sleep(watch.interval_s)
            stood_still = watch.stalled_s(loop.time()) > 0
            silent = 0 if self._heard or stood_still else silent + 1
            self._heard = False
            if silent == limit // 2:
                channel.disconnect()
        _log.warning("The controller was silent for %g s: the workers are stopped.", silence_s)
        self._lose_controller()

    async def _serve(self, channel: ResumableChannel[ControllerMessage], opened: ChannelOpened) -> None:
        """Carry out what the controller sends, until the channel is over and the workers are gone."""
        self._channel = channel
        self._is_serving = True
        self._controller_ended = False
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
                    torch=self._platform.find_torch(),
                )
            )
            self._spawn(self._receive_all(channel))
            self._spawn(self._renew_times())
            if channel.comes_back:
                self._spawn(self._watch_silence(channel, opened.silence_s))
            await self._end.wait()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._is_serving = self._is_paused = False
            await self._end_runs()
            if channel.comes_back and not self._comes_back:
                self._send(Leave())
            await channel.close()

    @property
    def _hosts(self) -> list[RunHost]:
        """All of which something may be left here."""
        return [*self._runs.values(), *self._closing]

    async def _end_runs(self) -> None:
        """Kill all workers of all runs."""
        runs = self._hosts
        await asyncio.gather(*(run.cancel() for run in runs))
        if self._lingers or self._comes_back:
            # The zygotes stay: for the next controller, and to remove what this process leaves if it is killed.
            await asyncio.gather(*(run.kill_workers() for run in runs))
        else:
            await self._spawners.close()
        for run in runs:
            run.release_workers()

    async def _forget_runs(self) -> None:
        """The controller is lost, and its uploads are finished: end what is left of its runs. Zygotes and functions
        stay, for a controller that has the same ones."""
        await asyncio.gather(*(run.close(0.0) for run in self._hosts))
        self._runs.clear()
        self._closing.clear()
        for key, function in list(self._functions.items()):
            if not function.is_whole:
                self._functions.pop(key).close()
        self._choose_death_signal()

    async def _receive_all(self, channel: ResumableChannel[ControllerMessage]) -> None:
        while True:
            while (envelope := await channel.recv()) is not None:
                self._heard = True
                self._handle(envelope.run, envelope.message)
            if self._is_draining and self._is_cut_off:
                self.shut_down()
            if not channel.comes_back or self._is_leaving or not await self._resume(channel):
                break
            self._heard = True
        self._lose_controller()

    def _handle(self, run: str, message: ControllerMessage) -> None:
        if isinstance(message, PrepareCode):
            self._prepare_code(message)
        elif isinstance(message, CodePiece | FunctionPiece):
            self._add_piece(message)
        elif isinstance(message, PrepareFunction):
            if message.key not in self._functions:
                self._functions[message.key] = FunctionMemory(message, self._code.get(message.code_hash))
        elif isinstance(message, PrepareRun):
            self._prepare(run, message)
        elif isinstance(message, Ping):
            assert self._channel is not None
            self._channel.signal(Pong())
        elif isinstance(message, Shutdown):
            if self._platform.stays and not self._is_draining:
                self._controller_ended = True
                self._lose_controller()
            else:
                self.shut_down(message.flush_s)
        elif isinstance(message, CloseRun):
            self._spawn(self._close_run(run, message.flush_s))
        elif (host := self._runs.get(run)) is not None:  # or it is closed already
            host.handle(message)

    def _add_piece(self, piece: CodePiece | FunctionPiece) -> None:
        """The next piece of a working directory or a function that was announced."""
        whole = self._code.get(piece.hash) if isinstance(piece, CodePiece) else self._functions.get(piece.key)
        if whole is None:
            _log.error("A %s is refused: what it belongs to was not announced.", type(piece).__name__)
        else:
            whole.add(piece.data)

    def _prepare_code(self, order: PrepareCode) -> None:
        """The driver's working directory comes next, unless it is here already."""
        found = self._code.get(order.hash)
        if found is None or not found.is_whole:
            self._code[order.hash] = CodeDirectory(order, self._session.path / "code" / order.hash)

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
            )
        self._runs[run].prepare(order, self._functions.get(order.function_key))

    async def _close_run(self, run: str, flush_s: float) -> None:
        """End one run; nothing of it is left on this node afterwards."""
        if (host := self._runs.pop(run, None)) is not None:
            self._closing.add(host)  # if this is cancelled, the end of the channel goes on with it
            await host.cancel()
            await host.kill_workers()
            host.release_workers()
            await host.close(flush_s)
            self._closing.discard(host)
            self._choose_death_signal()
        self._send(RunClosed(), run)

    def _send(self, message: AgentMessage, run: str = "") -> None:
        channel = self._channel
        if channel is None:
            return
        channel.send_nowait(message, run)
        if channel.backlog_bytes > _PAUSE_BACKLOG_BYTES and not self._is_paused and not self._end.is_set():
            self._is_paused = True
            self._spawn(self._wait_for_controller(channel))

    def _backlog_bytes(self) -> int:
        return self._channel.backlog_bytes if self._channel is not None else 0

    async def _wait_for_controller(self, channel: ResumableChannel[ControllerMessage]) -> None:
        """Let workers wait in `report` while the controller lags or is away, rather than fill this process's memory or
        lose what they reported."""
        paused = [run.pause() for run in self._runs.values()]
        await channel.drain(_RESUME_BACKLOG_BYTES)
        self._is_paused = False
        for workers in paused:
            if workers is not None:
                workers.resume()

    # ------------------------------------------------------------------ the end

    def _lose_controller(self) -> None:
        """The channel ended without a `Shutdown`. Uploads that were ordered may still be finished; all else ends."""
        self._platform.outlive_controller()
        self._controller_died = True
        self._end.set()

    @property
    def _comes_back(self) -> bool:
        """Whether the agent goes on after this channel."""
        leaves = self._is_leaving or self._is_draining or self._error is not None
        return self._channel is not None and self._channel.comes_back and not leaves

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
        if not self._comes_back:
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
        """An unexpected error that is no run's own ends the agent; the controller then handles its loss."""
        self._error = self._error or error
        self._end.set()


def _redial_pause_s(error: WireError, failures: int) -> float:
    """How long to wait before the next attempt to connect, after so many that failed."""
    return current().uniform(*_HUNG_UP_S) if isinstance(error, HungUp) else backoff_s(failures, *_REDIAL_S)

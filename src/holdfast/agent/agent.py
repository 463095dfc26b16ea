"""The agent: one per node, between the controller and the node's workers.

Connects to the controller, carries out its commands, and sends it the events of this node. Decides nothing: commands
come from the controller's core. `zygote_client` starts processes, `worker_group` watches them, `parts` holds what they
report, `artifact_sync` stores logs and artifacts. When the controller is gone, the workers are killed at once. Uploads
that it had ordered are finished first (`finish_uploads`), for at most HOLDFAST_LINGER_S; without any the agent ends at
once, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from holdfast.agent.buffers import Buffers
from holdfast.agent.finish_uploads import linger_s
from holdfast.agent.function_memory import FunctionMemory
from holdfast.agent.parts import UploadAnswer
from holdfast.agent.run_storage import RunStorage
from holdfast.agent.session_dir import SessionDir
from holdfast.agent.spawner import Parent, Spawner
from holdfast.agent.worker_group import WorkerGroup
from holdfast.agent.zygote_client import ZygoteSpawner
from holdfast.core.checkpoint_types import VerifiedFile
from holdfast.core.commands import AnnounceCheckpoint, AnnounceSettled, StartWorkers, StopWorkers
from holdfast.core.events import AgentJoined, AgentPrepared, DamageFound, WorkersStopped
from holdfast.errors import Damaged, HoldfastError, NotCommitted
from holdfast.linux.process import change_death_signal, live_without_parent
from holdfast.wire.channel import Channel, connect
from holdfast.wire.messages import (
    AgentMessage,
    Collected,
    ControllerMessage,
    FunctionPiece,
    LogLine,
    Logs,
    Ping,
    Pong,
    Prepare,
    Shutdown,
    Upload,
)
from holdfast.worker.job import Assignment
from holdfast.worker.stdio import detach_output

__all__ = ["Agent"]

_SYNC_EVERY_S = 30.0
_LAST_WORD_S = 1.0
_PAUSE_BACKLOG_BYTES = 32 * 1024 * 1024
_log = logging.getLogger(__name__)

_MakeSpawner = Callable[[Parent, SessionDir], Spawner]


class Agent:
    """One agent. `run` returns when the controller is gone, or has sent `Shutdown`, and everything is cleaned up."""

    def __init__(
        self,
        connect_to: str,
        token: str,
        agent_id: str,
        slots: int,
        *,
        tls_fingerprint: str | None = None,
        root: Path | None = None,
        make_spawner: _MakeSpawner | None = None,
        adopts_orphans: bool = False,
    ) -> None:
        self._connect_to = connect_to
        self._token = token
        self._id = agent_id
        self._host = socket.gethostname()
        self._slots = slots
        self._tls_fingerprint = tls_fingerprint
        self._root = root
        self._own_process = adopts_orphans
        self._make_spawner = make_spawner or (
            lambda parent, session: _zygote_spawner(parent, session, adopts_orphans=adopts_orphans)
        )
        self._channel: Channel[ControllerMessage] | None = None
        self._end = asyncio.Event()
        self._error: BaseException | None = None
        self._told_to_end = asyncio.Event()
        self._controller_died = False
        self._linger_s = linger_s()
        self._flush_s = 0.0
        self._workers: WorkerGroup | None = None
        self._prepare_message: Prepare | None = None
        self._function: FunctionMemory | None = None
        self._prepared: asyncio.Task[None] | None = None
        self._starting: tuple[int, asyncio.Task[None]] | None = None
        self._lifecycle = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False

    async def run(self) -> None:
        self._session = SessionDir(self._id, self._root)
        self._buffers = Buffers(self._slots)
        self._storage = RunStorage(self._session.path, self._buffers)
        self._spawner = self._make_spawner(self, self._session)
        try:
            channel = await connect(self._connect_to, self._token, self._tls_fingerprint, agent=self._id)
            self._channel = channel
            try:
                await self._serve(channel)
            finally:
                await channel.close()
            if self._lingers:
                await self._linger()
        finally:
            await self._spawner.close()
            await self._storage.close(self._flush_s)
            self._buffers.close()
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

    async def _serve(self, channel: Channel[ControllerMessage]) -> None:
        self._address = channel.local_host
        self._listener = _bind(self._address)
        try:
            self._send(
                AgentJoined(
                    agent=self._id,
                    host=self._host,
                    slots=self._slots,
                    address=self._address,
                    master_port=self._master_port,
                    pid=os.getpid(),
                )
            )
            self._spawn(self._receive_all(channel))
            self._spawn(self._sync_logs_periodically())
            await self._end.wait()
        finally:
            await self._clean_up()

    async def _receive_all(self, channel: Channel[ControllerMessage]) -> None:
        while (message := await channel.recv()) is not None:
            self._handle(message)
        self._lose_controller()

    def _lose_controller(self) -> None:
        """The connection ended without a `Shutdown`. Uploads that were ordered may still be finished; all else ends."""
        if self._own_process:
            # A dying controller's connection ends first, and this process may be killed a moment later, when it has
            # told the zygote that it removes its files itself.
            live_without_parent()
        self._controller_died = True
        self._end.set()

    @property
    def _lingers(self) -> bool:
        """Whether uploads must be finished for a controller that died."""
        return (
            self._controller_died
            and self._linger_s > 0
            and not self._told_to_end.is_set()
            and bool(self._storage.parts.ordered)
        )

    async def _linger(self) -> None:
        """Finish the uploads that were ordered, within the time limit, unless told to end."""
        if self._own_process:
            detach_output()
        finishing = asyncio.ensure_future(self._storage.finish_uploads())
        told = asyncio.ensure_future(self._told_to_end.wait())
        both: set[asyncio.Future[Any]] = {finishing, told}
        await asyncio.wait(both, timeout=self._linger_s, return_when=asyncio.FIRST_COMPLETED)
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)

    def _handle(self, message: ControllerMessage) -> None:
        if isinstance(message, Prepare):
            self._prepare_message = message
            if self._function is not None:
                self._function.close()
            self._function = FunctionMemory(message)
            self._prepared = self._spawn(self._prepare(message, self._function))
        elif isinstance(message, FunctionPiece):
            if self._function is not None:
                self._function.add(message.data)
        elif isinstance(message, StartWorkers):
            self._starting = (message.generation, self._spawn(self._start(message)))
        elif isinstance(message, StopWorkers):
            self._spawn(self._stop(message))
        elif isinstance(message, Upload):
            uploading = self._storage.start_upload(message)
            self._choose_death_signal()
            self._spawn(self._send_answer(uploading))
        elif isinstance(message, AnnounceCheckpoint):
            self._announce(message)
        elif isinstance(message, Collected | AnnounceSettled):
            if self._workers is not None and self._is_current(message.generation):
                self._workers.broadcast(message)
        elif isinstance(message, Ping):
            self._send(Pong())
        elif isinstance(message, Shutdown):
            self.shut_down(message.flush_s)

    # ------------------------------------------------------------------ generations

    async def _prepare(self, order: Prepare, function: FunctionMemory) -> None:
        await function.whole
        async with self._lifecycle:
            self._storage.prepare(order)
            self._spawn(self._storage.sync_artifacts_periodically())
            cold_reason = await self._spawner.prepare(order, function.fd)
        self._send(AgentPrepared(agent=self._id, cold_reason=cold_reason))

    async def _start(self, command: StartWorkers) -> None:
        async with self._lifecycle:
            assert self._prepared is not None and self._prepare_message is not None, (
                "a generation was started before the job was prepared"
            )
            await asyncio.shield(self._prepared)
            await self._end_generation()
            verified = await self._verify(command)
            if verified is None:
                return
            await self._spawner.ready()
            self._workers = workers = WorkerGroup(
                command.generation,
                (self._id, self._host),
                self._spawner,
                self._storage.parts,
                self._send,
                self._backlog_bytes,
                self._storage.log_writer,
            )
            (place,) = command.places
            for local_rank, rank in enumerate(place.ranks):
                listen_fd = self._hand_over_listener(command.master_port) if rank == 0 else None
                log_file = self._session.logs(command.generation) / f"rank_{rank}.log"
                assignment = _assign(self._prepare_message, command, local_rank, self._session, self._buffers, verified)
                workers.spawn(assignment, log_file, listen_fd)

    async def _verify(self, command: StartWorkers) -> list[VerifiedFile] | None:
        """Verify the checkpoint to start from; None if it is damaged, which the controller is told."""
        if (name := command.checkpoint) is None:
            return []
        try:
            return await self._storage.verify(name)
        except (Damaged, NotCommitted) as error:
            _log.error("%s", error)
            generation = command.generation
            self._send(DamageFound(generation=generation, agent=self._id, checkpoint=name, why=str(error)))
            return None
        except HoldfastError as error:
            _log.warning("%s could not be verified, its readers will: %s", name, error)
            return []

    async def _stop(self, command: StopWorkers) -> None:
        generation = command.generation
        if self._starting is not None and self._starting[0] == generation:
            self._starting[1].cancel()  # no effect once its workers are on their way
        if self._is_current(generation):
            async with self._lifecycle:
                if self._is_current(generation):
                    await self._end_generation(command.dump_stacks)
        self._send(WorkersStopped(generation=generation, agent=self._id, master_port=self._master_port))

    def _is_current(self, generation: int) -> bool:
        return self._workers is not None and self._workers.number == generation

    async def _end_generation(self, dump_stacks: bool = False) -> None:
        if self._workers is None:
            return
        await self._workers.stop(dump_stacks)
        self._storage.generation_ended(self._session.staging(self._workers.number))
        self._spawn(asyncio.to_thread(shutil.rmtree, self._session.temporary(self._workers.number), True))
        self._workers = None

    def _hand_over_listener(self, port: int) -> int | None:
        """The socket that was announced, for rank 0; a fresh one takes its place for the next generation."""
        if port != self._master_port:
            return None
        listener, self._listener = self._listener, _bind(self._address)
        return listener.detach()

    @property
    def _master_port(self) -> int:
        return int(self._listener.getsockname()[1])

    # ------------------------------------------------------------------ calls of the spawner (`spawner.Parent`)

    def worker_started(self, generation: int, rank: int, pid: int) -> None:
        if self._workers is not None and self._is_current(generation):
            self._workers.worker_started(rank, pid)

    def worker_died(self, generation: int, rank: int, status: int, *, killed: bool) -> None:
        if self._workers is not None and self._is_current(generation):
            self._workers.worker_died(rank, status, killed=killed)

    def workers_lost(self, why: str) -> None:
        if self._workers is not None:
            self._workers.workers_lost(why)

    def spawner_output(self, text: str) -> None:
        _log.info("%s", text)
        number = 0 if self._workers is None else self._workers.number
        self._send(Logs(generation=number, lines=[LogLine(-1, "holdfast", line) for line in text.splitlines()]))

    # ------------------------------------------------------------------ storage

    async def _send_answer(self, uploading: asyncio.Task[UploadAnswer]) -> None:
        self._send(await asyncio.shield(uploading))

    def _choose_death_signal(self) -> None:
        """Choose what the kernel sends this process when the controller's dies: SIGKILL, or SIGHUP while there are
        uploads to finish."""
        if self._own_process and self._linger_s > 0:
            change_death_signal(signal.SIGHUP if self._storage.parts.ordered else signal.SIGKILL)

    def _announce(self, command: AnnounceCheckpoint) -> None:
        """A checkpoint is committed or given up: drop its parts, and tell the workers."""
        self._storage.release_parts(command)
        self._choose_death_signal()
        if self._workers is not None and self._is_current(command.ticket.generation):
            self._workers.broadcast(command)

    async def _sync_logs_periodically(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_EVERY_S)
            self._session.renew_times()
            await self._storage.sync_logs()

    # ------------------------------------------------------------------ the loop around it

    def _send(self, message: AgentMessage) -> None:
        channel = self._channel
        if channel is None:
            return
        channel.send_nowait(message)
        if channel.backlog_bytes > _PAUSE_BACKLOG_BYTES and not self._draining and not self._end.is_set():
            self._draining = True
            self._spawn(self._wait_for_controller(channel))

    def _backlog_bytes(self) -> int:
        return self._channel.backlog_bytes if self._channel is not None else 0

    async def _wait_for_controller(self, channel: Channel[ControllerMessage]) -> None:
        """Let workers wait in `report` while the controller lags, rather than fill this process's memory."""
        paused = self._workers
        if paused is not None:
            paused.pause()
        await channel.drain()
        self._draining = False
        if paused is not None:
            paused.resume()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task. An unexpected error in it ends the agent; the controller then handles the loss of the agent."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._end.set()

    async def _clean_up(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._lingers:
            # The zygote stays: should this process be killed, it removes what that leaves.
            await self._spawner.clear(0 if self._workers is None else self._workers.number)
        else:
            await self._spawner.close()
        if self._function is not None:
            self._function.close()
        if self._workers is not None:
            self._workers.release()
        self._listener.close()


def _zygote_spawner(parent: Parent, session: SessionDir, adopts_orphans: bool) -> ZygoteSpawner:
    spawner = ZygoteSpawner(parent, session.leftovers, adopts_orphans=adopts_orphans)
    spawner.launch()
    return spawner


def _bind(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=512)


def _assign(
    prepare: Prepare,
    start: StartWorkers,
    local_rank: int,
    session: SessionDir,
    buffers: Buffers,
    verified: list[VerifiedFile],
) -> Assignment:
    """The assignment of the worker with this local rank; `start` has this node's place only."""
    (place,) = start.places
    rank = place.ranks[local_rank]
    return Assignment(
        generation=start.generation,
        rank=rank,
        local_rank=local_rank,
        node_rank=place.node_rank,
        world_size=start.world_size,
        local_world_size=len(place.ranks),
        node_count=start.node_count,
        master_address=start.master_address,
        master_port=start.master_port,
        restart_count=start.restart_count,
        max_restarts=prepare.max_restarts,
        checkpoint=start.checkpoint,
        storage=prepare.storage,
        experiment=prepare.experiment,
        trial_id=prepare.trial_id,
        trial_dir=prepare.trial_dir,
        work_dir=prepare.work_dir,
        staging_dir=str(session.staging(start.generation)),
        temp_dir=str(session.temporary(start.generation)),
        error_file=str(session.error_file(start.generation, rank)),
        change_directory=prepare.change_directory,
        buffers=buffers.of_slot(local_rank),
        snapshot_limit_bytes=buffers.limit_bytes,
        snapshots=buffers.snapshots(start.checkpoint),
        verified=verified,
    )

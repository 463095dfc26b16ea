"""The run host: one run on this node, with its generation, the parts that its workers reported, and its storage.

Carries out the controller's commands for this run, and sends it what happens. Decides nothing, and is free of processes
and sockets: those are `platform`'s and the spawner's. `worker_group` watches the workers, `run_storage` uploads.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.agent.buffers import Buffers
from holdfast.agent.function_memory import FunctionMemory
from holdfast.agent.parts import UploadAnswer
from holdfast.agent.platform import Platform
from holdfast.agent.run_storage import RunStorage
from holdfast.agent.session_dir import RunDirectory
from holdfast.agent.spawner import SpawnError, Spawners
from holdfast.agent.worker_group import WorkerGroup
from holdfast.core.checkpoint_types import VerifiedFile
from holdfast.core.commands import (
    AnnounceCheckpoint,
    AnnouncePreemption,
    AnnounceSettled,
    HoldReports,
    StartWorkers,
    StopWorkers,
)
from holdfast.core.events import AgentPrepared, DamageFound, WorkerExited, WorkersStopped
from holdfast.core.records import WorkerFailure
from holdfast.errors import Damaged, HoldfastError, NotCommitted, StorageError, WireError
from holdfast.streaming.messages import ServedStorage
from holdfast.wire.messages import (
    AgentMessage,
    Collected,
    ControllerMessage,
    LogLine,
    Logs,
    PrepareRun,
    StorageServed,
    StorageUnseen,
    Upload,
)
from holdfast.worker.job import Assignment

if TYPE_CHECKING:
    from holdfast.streaming.server import StorageServer

__all__ = ["RunHost"]

_SYNC_EVERY_S = 30.0
_log = logging.getLogger(__name__)


class RunHost:
    """One run on this node. Used from the agent's event loop."""

    def __init__(
        self,
        run: str,
        node: tuple[str, str],
        platform: Platform,
        directory: RunDirectory,
        spawners: Spawners,
        buffers: Buffers,
        address: str,
        send: Callable[[AgentMessage], None],
        backlog_bytes: Callable[[], int],
        on_uploads: Callable[[], None],
    ) -> None:
        """`node` is the agent's name and its host, `address` where others reach it. `on_uploads` is called when there
        may be uploads to finish, or none any more."""
        self._run = run
        self._agent, self._host = node
        self._platform = platform
        self._directory = directory
        self._on_uploads = on_uploads
        self._send = send
        self._backlog_bytes = backlog_bytes
        self._buffers = buffers
        self._storage = RunStorage(directory, self._buffers)
        self._spawner = spawners.spawner(run, self)
        self._address = address
        self._master_port = platform.open_master_port(address)
        self._order: PrepareRun | None = None
        self._served: ServedStorage | None = None
        """Where the run's storage is served, if this node does not see it."""
        self._storage_answer: asyncio.Future[StorageServed] | None = None
        self._snapshot_server: StorageServer | None = None
        """Gives other nodes what this one has in memory, if they do not share the run's storage."""
        self._prepared: asyncio.Task[None] | None = None
        self._unprepared: Exception | None = None
        """Why the run cannot be prepared: told as the failure of every worker that is to be started."""
        self._workers: WorkerGroup | None = None
        self._starting: tuple[StartWorkers, asyncio.Task[None]] | None = None
        self._lifecycle = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], None] = {}

    # ------------------------------------------------------------------ commands

    def prepare(self, order: PrepareRun, function: FunctionMemory | None) -> None:
        """What the run needs; replaces what was there before. `function` is None if the controller has not sent it."""
        order = msgspec.structs.replace(order, work_dir=self._platform.work_dir(order.work_dir))
        if self._order is None:
            self._spawn(self._sync_logs_periodically())
        self._order = order
        self._prepared = self._spawn(self._prepare(order, function))

    def handle(self, message: ControllerMessage) -> None:
        """Carry out one command."""
        try:
            self._handle(message)
        except Exception as error:  # noqa: BLE001  this run's failure, not that of all runs here
            self._failed(error)

    def _handle(self, message: ControllerMessage) -> None:
        if isinstance(message, StartWorkers):
            self._starting = (message, self._spawn(self._start(message)))
        elif isinstance(message, StopWorkers):
            self._spawn(self._stop(message))
        elif isinstance(message, Upload):
            uploading = self._storage.start_upload(message)
            self._on_uploads()
            self._spawn(self._send_answer(uploading))
        elif isinstance(message, AnnounceCheckpoint):
            self._announce(message)
        elif isinstance(message, StorageServed):
            if self._storage_answer is not None and not self._storage_answer.done():
                self._storage_answer.set_result(message)
        elif isinstance(message, Collected | AnnouncePreemption | AnnounceSettled | HoldReports) and self._is_current(
            message.generation
        ):
            assert self._workers is not None
            self._workers.broadcast(message)

    def pause(self) -> WorkerGroup | None:
        """Let the workers wait in `report`; gives the group that must be resumed."""
        if self._workers is not None:
            self._workers.pause()
        return self._workers

    # ------------------------------------------------------------------ generations

    async def _prepare(self, order: PrepareRun, function: FunctionMemory | None) -> None:
        self._unprepared = cold_reason = None
        try:
            if function is None:
                raise WireError(f"The controller has not sent the function {order.function_key!r} of this run.")
            await function.ready()
            async with self._lifecycle:
                self._directory.make_work_dir(Path(order.work_dir))
                self._served = served = await self._find_storage(order)
                open_store = functools.partial(self._platform.open_store, order)
                if served is not None:
                    open_store = functools.partial(self._platform.open_streamed, order, self._find_server)
                self._storage.prepare(order, open_store, is_streamed=served is not None)
                if served is not None and order.snapshot_key:
                    await self._serve_snapshots(order)
                self._spawn(self._storage.sync_artifacts_periodically())
                cold_reason = await self._spawner.prepare(function, order)
        except SpawnError as error:
            _log.error("%s", error)  # `_start` tries again
        except (HoldfastError, OSError) as error:
            _log.error("%s", error)
            self._unprepared = error
        except Exception as error:  # noqa: BLE001  as in `handle`
            _log.error("Run %s cannot be prepared here: %r", self._run, error, exc_info=error)
            self._unprepared = _internal(error)
        port = self._master_port.number
        server = self._snapshot_server
        self._send(
            AgentPrepared(
                agent=self._agent,
                cold_reason=cold_reason,
                master_port=port,
                snapshot_port=0 if server is None else server.port,
            )
        )

    async def _find_storage(self, order: PrepareRun) -> ServedStorage | None:
        """Where the run's storage is served, if this node does not see it: another directory of the same path must not
        be taken for it."""
        if order.probe is None or await asyncio.to_thread(self._platform.sees_storage, order.probe):
            return None
        self._storage_answer = asyncio.get_running_loop().create_future()
        self._send(StorageUnseen())
        answer = await self._storage_answer
        if answer.error:
            raise StorageError(f"{answer.root} is not seen by {self._host}, and cannot be served: {answer.error}")
        text = f"{answer.root} is not seen by {self._host}: its files go through the driver's machine."
        self._send(Logs(generation=0, lines=[LogLine(-1, "holdfast", text)]))
        return self._platform.find_server(answer)

    def _find_server(self) -> ServedStorage:
        assert self._served is not None
        return self._served

    async def _serve_snapshots(self, order: PrepareRun) -> None:
        """Let other nodes read what this one has in memory; if that cannot be, they read storage."""
        from holdfast.agent.snapshot_server import ServedSnapshots  # few runs need it

        if self._snapshot_server is not None:
            return
        files = ServedSnapshots(self._buffers, asyncio.get_running_loop())
        serve = functools.partial(self._platform.serve_snapshots, files, self._address, order.snapshot_key)
        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        try:
            self._snapshot_server = await asyncio.shield(serving)
        except asyncio.CancelledError:
            serving.add_done_callback(_close_server)  # the thread goes on
            raise
        except (HoldfastError, OSError) as error:
            _log.warning("Other nodes cannot read the snapshots of this one: %s", error)

    async def _start(self, command: StartWorkers) -> None:
        async with self._lifecycle:
            assert self._prepared is not None and self._order is not None, (
                "a generation was started before the job was prepared"
            )
            await asyncio.shield(self._prepared)
            await self._end_generation()
            if self._unprepared is not None:
                self._fail_workers(command, self._unprepared)
                return
            verified = await self._verify(command)
            if verified is None:
                return
            await self._fetch_snapshots(command)
            try:
                await self._spawner.ready()
            except SpawnError as error:
                self._fail_workers(command, error)
                return
            self._workers = workers = WorkerGroup(
                command.generation,
                (self._agent, self._host),
                self._platform,
                self._spawner,
                self._storage.parts,
                self._send,
                self._backlog_bytes,
                functools.partial(self._storage.open_log, command.generation),
            )
            (place,) = command.places
            self._buffers.free_slots(len(place.ranks), None if command.checkpoint is None else command.token)
            for assignment in self._assign(self._order, command, verified):
                listen_fd = self._master_port.hand_over(command.master_port) if assignment.rank == 0 else None
                workers.spawn(assignment, listen_fd)

    def _fail_workers(self, command: StartWorkers, error: Exception) -> None:
        """No worker of this generation can be started here, for a reason that is the run's own."""
        _log.error("%s", error)
        cause = f"not started: {str(error).rstrip('.')}"
        for rank in command.places[0].ranks:
            failure = WorkerFailure(rank=rank, cause=cause, agent=self._agent, host=self._host)
            self._send(WorkerExited(generation=command.generation, failure=failure))

    async def _verify(self, command: StartWorkers) -> list[VerifiedFile] | None:
        """Verify the checkpoint to start from; None if it is damaged, which the controller is told."""
        if (name := command.checkpoint) is None:
            return []
        try:
            return await self._storage.verify(name)
        except (Damaged, NotCommitted) as error:
            _log.error("%s", error)
            generation = command.generation
            self._send(DamageFound(generation=generation, agent=self._agent, checkpoint=name, why=str(error)))
            return None
        except HoldfastError as error:
            _log.warning("%s could not be verified, its readers will: %s", name, error)
            return []

    async def _fetch_snapshots(self, command: StartWorkers) -> None:
        """Where nodes do not share the run's storage: have what this one lacks of the checkpoint in its memory before
        workers start, from other nodes that have it in theirs. What goes wrong costs nothing but time."""
        from holdfast.agent.snapshot_fetch import SnapshotFetch

        name, token = command.checkpoint, command.token
        others = [one for one in command.neighbours if one.agent != self._agent]
        if name is None or self._served is None or self._order is None or not others:
            return
        key, open_neighbour = self._order.snapshot_key, self._platform.open_neighbour
        fetch = SnapshotFetch(name, token, {one.agent: open_neighbour(one, key, token) for one in others})
        try:
            if await self._storage.fetch_snapshots(fetch, token):
                self._log_line(command, fetch.summary)
        except (HoldfastError, OSError) as error:
            self._log_line(command, f"{name} is read from storage: {error}")
        for problem in fetch.problems.values():
            self._log_line(command, problem)

    def _log_line(self, command: StartWorkers, text: str) -> None:
        _log.info("%s", text)
        self._send(Logs(generation=command.generation, lines=[LogLine(-1, "holdfast", text)]))

    async def _stop(self, command: StopWorkers) -> None:
        generation = command.generation
        if self._starting is not None and self._starting[0].generation == generation:
            self._starting[1].cancel()  # no effect once its workers are on their way
        if self._is_current(generation):
            async with self._lifecycle:
                if self._is_current(generation):
                    try:
                        await self._end_generation(command.dump_stacks)
                    except Exception:  # noqa: BLE001  as in `handle`
                        _log.exception("Generation %d did not end as it should; it is killed.", generation)
                        await self.kill_workers()
                        self._workers = None
        self._send(WorkersStopped(generation=generation, agent=self._agent, master_port=self._master_port.number))

    def _is_current(self, generation: int) -> bool:
        return self._workers is not None and self._workers.number == generation

    async def _end_generation(self, dump_stacks: bool = False) -> None:
        if self._workers is None:
            return
        await self._workers.stop(dump_stacks)
        self._storage.generation_ended(self._directory.staging(self._workers.number))
        if not self._directory.drop_temporary(self._workers.number):
            self._spawn(asyncio.to_thread(self._directory.remove_temporary, self._workers.number))
        self._workers = None

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

    @property
    def has_uploads(self) -> bool:
        """Whether there are uploads that must come to their end even if the controller dies."""
        return bool(self._storage.parts.ordered)

    async def finish_uploads(self) -> None:
        """The controller has died: finish the uploads that it had ordered, for the next one to commit. Where this node
        does not see the storage, the next one is needed for that, too."""
        tokens = [one.order.draft.token for one in self._storage.parts.ordered]
        if self._served is None or not tokens:
            await self._storage.finish_uploads()
            return
        async with self._platform.find_next_server(self._served.root, tokens) as served:
            if served is None:
                _log.warning("What was being stored is given up: no driver serves %s any more.", self._served.root)
                return
            self._served = served
            await self._storage.finish_uploads()

    async def _send_answer(self, uploading: asyncio.Task[UploadAnswer]) -> None:
        self._send(await asyncio.shield(uploading))

    def _announce(self, command: AnnounceCheckpoint) -> None:
        """A checkpoint is committed or given up: drop its parts, and tell the workers."""
        self._storage.release_parts(command)
        self._on_uploads()
        if self._workers is not None and self._is_current(command.ticket.generation):
            self._workers.broadcast(command)

    async def _sync_logs_periodically(self) -> None:
        while True:
            assert self._order is not None
            await asyncio.sleep(min(_SYNC_EVERY_S, self._order.sync_period_s))
            await self._storage.sync_logs()

    # ------------------------------------------------------------------ the end

    async def cancel(self) -> None:
        """Take no more commands, and give up those that are being carried out. Uploads go on."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def kill_workers(self) -> None:
        """Returns when none is left."""
        await self._spawner.clear(0 if self._workers is None else self._workers.number)

    def release_workers(self) -> None:
        """The workers are gone: read what they left, and free what is theirs."""
        if self._workers is not None:
            self._workers.release()
        self._master_port.close()
        self._spawner.release()

    async def close(self, flush_s: float) -> None:
        """Abandon uploads, take up to `flush_s` to store logs and artifacts, and free everything."""
        if self._snapshot_server is not None:
            self._snapshot_server.close()
        await self._storage.close(flush_s)
        self._buffers.close()
        self._directory.remove()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """An unexpected error: the workers of this run fail here, and nothing else."""
        _log.error("A part of run %s failed here: %r", self._run, error, exc_info=error)
        cause = _internal(error)
        if self._workers is not None and self._workers.has_workers:
            self._workers.workers_lost(str(cause))
        elif self._starting is not None:
            self._fail_workers(self._starting[0], cause)

    def _assign(self, order: PrepareRun, start: StartWorkers, verified: list[VerifiedFile]) -> Iterator[Assignment]:
        """The assignments of this node's workers; `start` has this node's place only."""
        (place,) = start.places
        shared = Assignment(
            run=self._run,
            generation=start.generation,
            rank=place.ranks[0],
            local_rank=0,
            node_rank=place.node_rank,
            world_size=start.world_size,
            local_world_size=len(place.ranks),
            node_count=start.node_count,
            address=self._address,
            master_address=start.master_address,
            master_port=start.master_port,
            restart_count=start.restart_count,
            max_restarts=order.max_restarts,
            checkpoint=start.checkpoint,
            storage=order.storage,
            served=self._served,
            filesystem=order.filesystem,
            config=order.config,
            experiment=order.experiment,
            trial_id=order.trial_id,
            trial_dir=order.trial_dir,
            work_dir=order.work_dir,
            staging_dir=str(self._directory.staging(start.generation)),
            temp_dir=str(self._directory.temporary(start.generation)),
            error_file="",
            change_directory=order.change_directory,
            has_validation=start.has_validation,
            all_metrics=start.all_metrics,
            awaits_decisions=order.awaits_decisions,
            snapshot_limit_bytes=self._buffers.limit_bytes,
            snapshots=self._buffers.snapshots(None if start.checkpoint is None else start.token),
            verified=verified,
        )
        for local_rank, rank in enumerate(place.ranks):
            yield msgspec.structs.replace(
                shared,
                rank=rank,
                local_rank=local_rank,
                error_file=str(self._directory.error_file(start.generation, rank)),
                gpus=place.gpus[local_rank] if place.gpus else None,
                buffers=self._buffers.of_slot(local_rank),
            )


def _close_server(serving: asyncio.Future[StorageServer]) -> None:
    """Nobody waits for this server any more."""
    if not serving.cancelled() and serving.exception() is None:
        serving.result().close()


def _internal(error: BaseException) -> RuntimeError:
    """What the controller is told of an error that nobody expected."""
    return RuntimeError(f"internal error of the agent: {error!r}")

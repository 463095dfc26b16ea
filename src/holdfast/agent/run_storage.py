"""The run's storage as the agent uses it: opened on first use, in a thread; parts, logs and artifacts are uploaded.

`parts`, `snapshot_fetch` and `artifact_sync` do the work; this holds what they share, and the threads that they run in.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.agent.artifact_sync import ArtifactSync
from holdfast.agent.buffers import Buffers
from holdfast.agent.finish_uploads import finish_uploads
from holdfast.agent.joined_output import JoinedOutput, output_part
from holdfast.agent.log_writer import LogWriter
from holdfast.agent.output import Forwarder, RankLog
from holdfast.agent.parts import Parts, UploadAnswer
from holdfast.agent.session_dir import RunDirectory
from holdfast.core.checkpoint_types import Snapshot, VerifiedFile
from holdfast.core.commands import AnnounceCheckpoint
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.runtime import current
from holdfast.storage.store import OnBytes, Store
from holdfast.wire.messages import PrepareRun, Upload
from holdfast.worker.snapshot_buffer import SnapshotBuffer, new_seal

if TYPE_CHECKING:
    from holdfast.agent.snapshot_fetch import SnapshotFetch

__all__ = ["RunStorage"]

_THREADS = 8
_UPLOAD_THREADS = 4
_NICENESS = 10
_LOGS_TIMEOUT_S = 30.0
"""A disk that has not taken the logs by then is stalled: what is there of them is stored."""

_log = logging.getLogger(__name__)


class RunStorage:
    """Storage work of one run on an agent. All methods are called from its event loop; what blocks runs in threads."""

    def __init__(self, directory: RunDirectory, buffers: Buffers) -> None:
        self._executor = current().make_executor(_THREADS, "holdfast-agent", _lower_priority)
        self._open: Callable[[], Store] | None = None
        self._is_streamed = False
        self._directory = directory
        self.log_writer = LogWriter()
        self._buffers = buffers
        self._order: PrepareRun | None = None
        self._mirror: ArtifactSync | None = None
        self._store: Store | None = None
        self._store_lock = threading.Lock()
        self.parts = Parts(self._executor, buffers, directory.session.path)

    def prepare(self, order: PrepareRun, open_store: Callable[[], Store], *, is_streamed: bool = False) -> None:
        """Use the storage that `order` names from here on. `is_streamed`: it has connections of its own."""
        work_dir = Path(order.work_dir)
        self._order = order
        self._open = open_store
        self._is_streamed = is_streamed
        self._store = None
        artifacts = work_dir if order.sync_artifacts else None
        logs = self._directory.logs
        output = JoinedOutput(logs, self._directory.output, order.output_files or ())
        self._mirror = ArtifactSync(self._open_store, logs, output, artifacts, order.sync_timeout_s)

    def open_log(self, generation: int, rank: int, forwarder: Forwarder) -> RankLog:
        """The log of one worker; the output of rank 0 goes to the files that the user named as well."""
        assert self._order is not None
        names, copies = self._order.output_files, {}
        if names is not None and rank == 0:
            parts = (output_part(self._directory.logs, generation, name) for name in names)
            copies = dict(zip(("stdout", "stderr"), parts, strict=True))
        path = self._directory.log_file(generation, rank)
        return RankLog(path, rank, forwarder, self.log_writer, copies)

    async def verify(self, name: str) -> list[VerifiedFile]:
        """Verify the checkpoint that a generation is to start from, where workers read it in place; gives the versions
        of its files for them. Raises `Damaged` or `NotCommitted`. Reading stops soon after this is cancelled."""
        cancelled = threading.Event()

        def on_bytes(count: int) -> None:
            if cancelled.is_set():
                raise CheckpointError(f"The verification of {name} was cancelled.")

        try:
            work = functools.partial(_verify, self._open_store, name, on_bytes)
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            cancelled.set()

    async def fetch_snapshots(self, fetch: SnapshotFetch, token: str) -> bool:
        """Have the files of a committed checkpoint that this node lacks come to its memory, if neighbours have any of
        them; whether they did. Raises `HoldfastError` if nothing comes of it. Stops soon after this is cancelled."""
        loop, buffers = asyncio.get_running_loop(), self._buffers

        def look(have: Collection[str]) -> int:
            return fetch.look(self._open_store(), have)

        def read(path: str, buffer: SnapshotBuffer) -> Snapshot:
            try:
                buffer.reserve(size_bytes)
                files = fetch.read_into(buffer.data)
                buffer.seal = seal = new_seal()
                return Snapshot(buffer=path, seal=seal, files=files)
            except (HoldfastError, OSError) as error:
                problem = str(error)
            finally:
                buffer.close()
            raise CheckpointError(problem)  # another one: the frames of the first keep the memory

        room = None
        try:
            size_bytes = await loop.run_in_executor(self._executor, look, buffers.stored_files(token))
            room = buffers.make_room(size_bytes) if size_bytes else None
            if room is None:
                return False
            # Opened here, and read to its end: once it is dropped, its path may be another file's.
            reading = loop.run_in_executor(self._executor, read, room, SnapshotBuffer.open(room))
            buffers.hold_fetched(await asyncio.shield(reading), token)
            room = None
            return True
        finally:
            fetch.cancel()
            if room is not None:
                buffers.drop(room)
            self._executor.submit(fetch.close)

    def start_upload(self, order: Upload) -> asyncio.Task[UploadAnswer]:
        return self.parts.start_upload(order, self._open_store, _UPLOAD_THREADS)

    async def finish_uploads(self) -> None:
        """The controller is gone: bring what it had ordered to its end, for the next one to commit."""
        await finish_uploads(self.parts, self._open_store, self._executor, _UPLOAD_THREADS)

    def release_parts(self, command: AnnounceCheckpoint) -> None:
        """A checkpoint is committed or given up: drop its parts, and after a commit store the artifacts, unless the
        user does not want that."""
        self.parts.release(command.ticket, None if command.name is None else command.token)
        wanted = self._order is not None and self._order.sync_artifacts_on_checkpoint
        if command.name is not None and self._mirror is not None and wanted:
            self._executor.submit(self._mirror.sync_artifacts)

    def generation_ended(self, staging: Path) -> None:
        if staging.is_dir():
            self.parts.remove_unreported(staging)
        if self._has_files:
            self._executor.submit(self._sync)

    async def sync_artifacts_periodically(self) -> None:
        """Store artifacts every `sync_period_s`, until another `PrepareRun` comes."""
        order, mirror = self._order, self._mirror
        assert order is not None and mirror is not None
        while order.sync_artifacts and self._order is order:
            await asyncio.sleep(order.sync_period_s)
            await asyncio.get_running_loop().run_in_executor(self._executor, mirror.sync_artifacts)

    async def sync_logs(self) -> None:
        """Store the logs while they are still written."""
        if self._mirror is not None and self.log_writer.is_used:
            work = functools.partial(self._mirror.sync_logs, still_written=True)
            await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def close(self, flush_s: float) -> None:
        """Take up to `flush_s` to store what is left of logs and artifacts, then close everything."""
        self.parts.abandon()
        if flush_s > 0 and self._has_files:
            with suppress(TimeoutError):
                async with asyncio.timeout(flush_s):
                    await asyncio.get_running_loop().run_in_executor(self._executor, self._sync)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.log_writer.close()
        if self._is_streamed and self._store is not None:
            self._store.close()

    @property
    def _has_files(self) -> bool:
        """Whether there may be logs or artifacts to store. Most trials print nothing, and need no thread for that."""
        return self.log_writer.is_used or (self._order is not None and self._order.sync_artifacts)

    def _sync(self) -> None:
        self.log_writer.wait_written(_LOGS_TIMEOUT_S)
        if self._mirror is not None:
            self._mirror.sync_logs()
            self._mirror.sync_artifacts()

    def _open_store(self) -> Store:
        with self._store_lock:
            if self._store is None:
                assert self._open is not None, "storage is used before the job was prepared"
                self._store = self._open()
            return self._store


def _lower_priority() -> None:
    """Lower the priority of this thread, and of those that it starts: training comes first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _verify(open_store: Callable[[], Store], name: str, on_bytes: OnBytes) -> list[VerifiedFile]:
    from holdfast.checkpoint.restore import verify_in_place

    return verify_in_place(open_store(), name, threads=_UPLOAD_THREADS, on_bytes=on_bytes)

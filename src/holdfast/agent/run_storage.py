"""The run's storage as the agent uses it: opened on first use, in a thread; parts, logs and artifacts are uploaded.

`parts` and `artifact_sync` do the work; this holds what they share, and the threads that they run in.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.agent.artifact_sync import ArtifactSync
from holdfast.agent.buffers import Buffers
from holdfast.agent.finish_uploads import finish_uploads
from holdfast.agent.log_writer import LogWriter
from holdfast.agent.parts import Parts, UploadAnswer
from holdfast.agent.session_dir import RunDirectory
from holdfast.core.checkpoint_types import VerifiedFile
from holdfast.core.commands import AnnounceCheckpoint
from holdfast.errors import CheckpointError, StorageError
from holdfast.runtime import current
from holdfast.storage.retry import without_retries
from holdfast.storage.store import OnBytes, Store
from holdfast.wire.messages import PrepareRun, Upload

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
        self._logs = directory.logs
        self.log_writer = LogWriter()
        self._order: PrepareRun | None = None
        self._mirror: ArtifactSync | None = None
        self._store: Store | None = None
        self._store_lock = threading.Lock()
        self.parts = Parts(self._executor, buffers, directory.session.path)

    def prepare(self, order: PrepareRun, open_store: Callable[[], Store], *, is_streamed: bool = False) -> None:
        """Use the storage that `order` names from here on. `is_streamed`: it goes with the controller."""
        work_dir = Path(order.work_dir)
        self._order = order
        self._open = open_store
        self._is_streamed = is_streamed
        self._store = None
        artifacts = work_dir if order.sync_artifacts else None
        self._mirror = ArtifactSync(self._open_store, self._logs, artifacts, order.sync_timeout_s)

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

    def start_upload(self, order: Upload) -> asyncio.Task[UploadAnswer]:
        return self.parts.start_upload(order, self._open_store, _UPLOAD_THREADS)

    async def finish_uploads(self) -> None:
        """The controller is gone: bring what it had ordered to its end, for the next one to commit."""
        if self._is_streamed and not await self._answers():
            _log.warning("What was being stored is given up: the storage server has ended with its driver.")
            return
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

    async def _answers(self) -> bool:
        try:
            work = functools.partial(_list_top, self._open_store)
            await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except StorageError:
            return False
        return True

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


def _list_top(open_store: Callable[[], Store]) -> None:
    without_retries(open_store()).children()


def _verify(open_store: Callable[[], Store], name: str, on_bytes: OnBytes) -> list[VerifiedFile]:
    from holdfast.checkpoint.restore import verify_in_place

    return verify_in_place(open_store(), name, threads=_UPLOAD_THREADS, on_bytes=on_bytes)

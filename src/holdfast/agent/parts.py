"""The parts of checkpoints that this node's workers handed over, from `report` until the controller has
settled them.

A part is a directory, or a snapshot in memory (`buffers`). It outlives its worker and its generation: it goes when
the controller says that the checkpoint is committed or given up. Uploads run in threads (`checkpoint.upload` does the
work); removing a part abandons an upload of it that is still going on.
When the controller dies, `finish_uploads` brings the uploads that it had ordered to their end.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.agent.buffers import Buffers, warm_up
from holdfast.checkpoint.upload_locks import UploadLock
from holdfast.core.checkpoint_types import FileEntry, Snapshot
from holdfast.core.failure_kind import FailureKind
from holdfast.errors import CheckpointError, ConfigError, HoldfastError, NotFound, OutOfSpace, Unavailable
from holdfast.storage.store import Store
from holdfast.wire.messages import Upload, Uploaded, UploadFailed, WorkerReport

__all__ = ["Answer", "OpenStore", "Ordered", "Parts"]

OpenStore = Callable[[], Store]
"""Opens the run's storage, or gives the one that is open; may block."""
Answer = Uploaded | UploadFailed


@dataclass(slots=True)
class _Part:
    """What one rank gave with one report: a directory of ours, a snapshot in our memory, or a name that is in the
    run's storage already."""

    staged: Path | None = None
    existing: str | None = None
    snapshot: Snapshot | None = None
    abandoned: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Ordered:
    """An upload that the controller ordered and whose checkpoint is not settled yet."""

    order: Upload
    work: asyncio.Task[Answer]


class _Abandoned(HoldfastError):
    """Nobody wants this upload any more."""


class Parts:
    """All parts on this node, by generation, report number and rank."""

    def __init__(self, executor: ThreadPoolExecutor, buffers: Buffers, session: Path | None = None) -> None:
        """`session` is the agent's directory: others find the locks of its uploads there."""
        self._executor = executor
        self._buffers = buffers
        self._session = session
        self._ordered: dict[tuple[int, int, int], Ordered] = {}
        self._locks: dict[str, UploadLock] = {}
        """By the token of the draft."""
        self._parts: dict[tuple[int, int, int], _Part] = {}
        self._samples: dict[int, dict[str, str]] = {}
        """What `upload_memory` keeps from one checkpoint to the next, for each rank."""

    def take(self, generation: int, rank: int, message: WorkerReport) -> None:
        """A worker reported; remember the part that came with it, if any."""
        number, snapshot = message.report.number, message.snapshot
        if snapshot is not None:
            self._buffers.hold(generation, number, snapshot)
            if (cold := self._buffers.to_warm_up(snapshot)) is not None:
                self._executor.submit(warm_up, *cold)
        if message.report.checkpoint:
            staged = Path(message.staged) if message.staged is not None else None
            self._parts[generation, number, rank] = _Part(staged, message.existing, snapshot)

    @property
    def ordered(self) -> list[Ordered]:
        """The uploads that were ordered and must come to their end even if the controller dies."""
        return [one for one in self._ordered.values() if one.order.info is not None]

    async def upload(self, order: Upload, store: OpenStore, threads: int) -> Answer:
        """Store one part; the answer says how that went. The upload goes on if the caller is cancelled."""
        return await asyncio.shield(self.start_upload(order, store, threads))

    def start_upload(self, order: Upload, store: OpenStore, threads: int) -> asyncio.Task[Answer]:
        """Begin to store one part; it is among those `ordered` from here on, until it is settled. `store` may block: it
        is called in the thread."""
        key = (order.generation, order.number, order.rank)
        work = asyncio.get_running_loop().create_task(self._upload(order, store, threads))
        if key in self._parts:
            self._ordered[key] = Ordered(order, work)
            token = order.draft.token
            if self._session is not None and order.info is not None and token not in self._locks:
                self._locks[token] = UploadLock(self._session, token)
        return work

    async def _upload(self, order: Upload, store: OpenStore, threads: int) -> Answer:
        part = self._parts.get((order.generation, order.number, order.rank))
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        name: dict[str, Any] = {"generation": order.generation, "number": order.number, "rank": order.rank}
        try:
            if part is None:
                raise NotFound(f"Rank {order.rank} gave this agent no checkpoint with its report {order.number}.")
            memory = None if part.snapshot is None else self._buffers.files(part.snapshot)
            samples = self._samples.setdefault(order.rank, {})
            work = functools.partial(_store_part, part, memory, samples, order, store, threads)
            files, sent_bytes = await loop.run_in_executor(self._executor, work)
            if part.snapshot is not None and not self._buffers.is_intact(part.snapshot):
                raise CheckpointError(f"The snapshot of rank {order.rank} was written to while it was being stored.")
        except HoldfastError as error:
            retryable = isinstance(error, Unavailable | OutOfSpace)
            return UploadFailed(**name, kind=FailureKind.of(error), error=str(error), retryable=retryable)
        except Exception as error:  # noqa: BLE001  a store's bug is that upload's failure, not the agent's end
            return UploadFailed(**name, kind=FailureKind.OTHER, error=f"{type(error).__name__}: {error}")
        return Uploaded(**name, files=files, elapsed_s=time.monotonic() - began, uploaded_bytes=sent_bytes)

    def settle(self, generation: int, number: int, name: str | None) -> None:
        """The controller has no more use for the parts of this report: they are committed under `name`, or (None)
        given up."""
        self._buffers.settle(generation, number, name)
        for key in [key for key in self._parts if key[:2] == (generation, number)]:
            part = self._parts.pop(key)
            part.abandoned.set()
            self._ordered.pop(key, None)
            if part.staged is not None:
                self._executor.submit(shutil.rmtree, part.staged, ignore_errors=True)
        tokens = {one.order.draft.token for one in self._ordered.values()}
        for token in [token for token in self._locks if token not in tokens]:
            self._locks.pop(token).release()

    def remove_unreported(self, staging: Path) -> None:
        """Remove what killed workers were still copying when they died; their agent never heard of it."""
        known = {part.staged for part in self._parts.values()}
        for path in list(staging.iterdir()):
            if path not in known:
                self._executor.submit(shutil.rmtree, path, ignore_errors=True)

    def abandon(self) -> None:
        """The end: let every upload stop at its next block."""
        for part in self._parts.values():
            part.abandoned.set()
        for one in self._ordered.values():
            one.work.cancel()

    def abandon_draft(self, token: str) -> None:
        """Let the uploads to one draft stop at their next block."""
        for key, one in self._ordered.items():
            if one.order.draft.token == token:
                self._parts[key].abandoned.set()


def _store_part(
    part: _Part,
    memory: dict[str, memoryview] | None,
    samples: dict[str, str],
    order: Upload,
    open_store: Callable[[], Store],
    threads: int,
) -> tuple[list[FileEntry], int]:
    from holdfast.checkpoint.upload import reference_existing, upload_memory, upload_part

    sent_bytes = 0
    lock = threading.Lock()

    def on_bytes(count: int) -> None:
        if part.abandoned.is_set():
            raise _Abandoned("The run has given this checkpoint up.")

    def on_sent(count: int) -> None:
        nonlocal sent_bytes
        with lock:
            sent_bytes += count

    upload: dict[str, Any] = {
        "rank": order.rank,
        "parent_files": order.parent_files,
        "threads": threads,
        "on_bytes": on_bytes,
        "on_sent": on_sent,
    }
    if memory is not None:
        files = upload_memory(open_store(), order.draft, memory, samples=samples, **upload)
    elif part.staged is not None:
        files = upload_part(open_store(), order.draft, part.staged, **upload)
    else:
        assert part.existing is not None
        if part.existing != order.draft.name:
            raise ConfigError(
                f"The files of rank {order.rank} lie in {part.existing!r}, but the checkpoint is {order.draft.name!r}: "
                "with CheckpointUploadMode.NO_UPLOAD all ranks must write to one directory of the run."
            )
        files = reference_existing(open_store(), part.existing, on_bytes=on_bytes)
    return files, sent_bytes

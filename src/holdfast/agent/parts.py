"""The parts of checkpoints that this node's workers reported, from `report` until the checkpoint is committed or given
up (`AnnounceCheckpoint`).

A part is a directory, or a snapshot in memory (`buffers`). It outlives its worker and its generation. Uploads run in
threads (`checkpoint.upload` does the work); removing a part abandons an upload of it that is still going on.
When the controller dies, `finish_uploads` brings the uploads that it had ordered to their end.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.agent.buffers import Buffers, warm_up
from holdfast.checkpoint.upload_locks import UploadLock
from holdfast.core.checkpoint_types import ExistingPart, FileEntry, Part, Snapshot, StagedPart
from holdfast.core.events import Ticket
from holdfast.core.failure_kind import FailureKind
from holdfast.errors import CheckpointError, ConfigError, HoldfastError, NotFound
from holdfast.storage.store import Store
from holdfast.wire.messages import Upload, Uploaded, UploadFailed, WorkerReport

__all__ = ["OpenStore", "Ordered", "Parts", "UploadAnswer"]

OpenStore = Callable[[], Store]
"""Opens the run's storage, or gives the one that is open; may block."""
UploadAnswer = Uploaded | UploadFailed


@dataclass(slots=True)
class _HeldPart:
    """A part that the agent holds until its checkpoint is committed or given up."""

    part: Part
    abandoned: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Ordered:
    """An upload that the controller ordered and whose checkpoint is neither committed nor given up yet."""

    order: Upload
    work: asyncio.Task[UploadAnswer]


class _Abandoned(HoldfastError):
    """This upload was abandoned."""


class Parts:
    """All parts on this node, by ticket and rank."""

    def __init__(self, executor: Executor, buffers: Buffers, session: Path | None = None) -> None:
        """`session` is the agent's directory: others find the locks of its uploads there."""
        self._executor = executor
        self._buffers = buffers
        self._session = session
        self._ordered: dict[tuple[Ticket, int], Ordered] = {}
        self._locks: dict[str, UploadLock] = {}
        """By the token of the draft."""
        self._parts: dict[tuple[Ticket, int], _HeldPart] = {}
        self._samples: dict[int, dict[str, str]] = {}
        """What `upload_memory` keeps from one checkpoint to the next, for each rank."""

    def add(self, generation: int, rank: int, message: WorkerReport) -> None:
        """A worker reported; hold the part that came with it, if any."""
        part = message.part
        if part is None:
            return
        ticket = Ticket(generation, message.report.number)
        if isinstance(part, Snapshot):
            self._buffers.hold(ticket, part)
            if (cold := self._buffers.to_warm_up(part)) is not None:
                self._executor.submit(warm_up, *cold)
        self._parts[ticket, rank] = _HeldPart(part)

    def reserve_buffers(self, slot: int, size_bytes: int, count: int) -> int:
        """A worker wants so many snapshot buffers of this size; gives how many it may have."""
        return self._buffers.reserve(slot, size_bytes, count)

    @property
    def ordered(self) -> list[Ordered]:
        """The uploads that were ordered and must come to their end even if the controller dies."""
        return [one for one in self._ordered.values() if one.order.info is not None]

    async def upload(self, order: Upload, store: OpenStore, threads: int) -> UploadAnswer:
        """Store one part; the answer says how that went. The upload goes on if the caller is cancelled."""
        return await asyncio.shield(self.start_upload(order, store, threads))

    def start_upload(self, order: Upload, store: OpenStore, threads: int) -> asyncio.Task[UploadAnswer]:
        """Begin to store one part; it is among those `ordered` from here on, until it is released. `store` may block:
        it is called in the thread."""
        key = (order.ticket, order.rank)
        work = asyncio.get_running_loop().create_task(self._upload(order, store, threads))
        if key in self._parts:
            self._ordered[key] = Ordered(order, work)
            token = order.draft.token
            if self._session is not None and order.info is not None and token not in self._locks:
                self._locks[token] = UploadLock(self._session, token)
        return work

    async def _upload(self, order: Upload, store: OpenStore, threads: int) -> UploadAnswer:
        held = self._parts.get((order.ticket, order.rank))
        loop = asyncio.get_running_loop()
        name: dict[str, Any] = {"ticket": order.ticket, "rank": order.rank, "token": order.draft.token}
        try:
            if held is None:
                number = order.ticket.number
                raise NotFound(f"Rank {order.rank} gave this agent no checkpoint with its report {number}.")
            snapshot = held.part if isinstance(held.part, Snapshot) else None
            memory = None if snapshot is None else self._buffers.files(snapshot)
            samples = self._samples.setdefault(order.rank, {})
            work = functools.partial(_store_part, held, memory, samples, order, store, threads)
            files, sent_bytes = await loop.run_in_executor(self._executor, work)
            if snapshot is not None and not self._buffers.is_intact(snapshot):
                raise CheckpointError(
                    f"The snapshot of rank {order.rank} with report {order.ticket.number} was written to while it was "
                    f"being stored: {self._buffers.describe_change(snapshot)}."
                )
        except HoldfastError as error:
            return UploadFailed(**name, kind=FailureKind.of(error), error=str(error))
        except Exception as error:  # noqa: BLE001  a store's bug is that upload's failure, not the agent's end
            return UploadFailed(**name, kind=FailureKind.OTHER, error=f"{type(error).__name__}: {error}")
        return Uploaded(**name, files=files, uploaded_bytes=sent_bytes)

    def release(self, ticket: Ticket, token: str | None) -> None:
        """Drop the parts of this ticket: its checkpoint is committed with this token, or (None) given up."""
        self._buffers.release(ticket, token)
        for key in [key for key in self._parts if key[0] == ticket]:
            held = self._parts.pop(key)
            held.abandoned.set()
            self._ordered.pop(key, None)
            if isinstance(held.part, StagedPart):
                self._executor.submit(shutil.rmtree, held.part.directory, ignore_errors=True)
        tokens = {one.order.draft.token for one in self._ordered.values()}
        for token in [token for token in self._locks if token not in tokens]:
            self._locks.pop(token).release()

    def remove_unreported(self, staging: Path) -> None:
        """Remove what killed workers were still copying when they died and so never reported."""
        known = {held.part.directory for held in self._parts.values() if isinstance(held.part, StagedPart)}
        self._executor.submit(_remove_all_but, known, staging)

    def abandon(self) -> None:
        """Let every upload stop at its next block, since the run ends here. An agent that comes back lives on: the next
        controller must not wait for it."""
        for held in self._parts.values():
            held.abandoned.set()
        for one in self._ordered.values():
            one.work.cancel()
        while self._locks:
            self._locks.popitem()[1].release()

    def abandon_draft(self, token: str) -> None:
        """Let the uploads to one draft stop at their next block."""
        for key, one in self._ordered.items():
            if one.order.draft.token == token:
                self._parts[key].abandoned.set()


def _remove_all_but(known: set[str], staging: Path) -> None:
    for path in list(staging.iterdir()) if staging.is_dir() else []:
        if str(path) not in known:
            shutil.rmtree(path, ignore_errors=True)


def _store_part(
    held: _HeldPart,
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
        if held.abandoned.is_set():
            raise _Abandoned("The run has given this checkpoint up.")

    def on_sent(count: int) -> None:
        nonlocal sent_bytes
        with lock:
            sent_bytes += count

    upload: dict[str, Any] = {
        "rank": order.rank,
        "parent_files": order.parent_files,
        "hash_only": order.hash_only,
        "threads": threads,
        "on_bytes": on_bytes,
        "on_sent": on_sent,
    }
    part = held.part
    if memory is not None:
        files = upload_memory(open_store(), order.draft, memory, samples=samples, **upload)
    elif isinstance(part, StagedPart):
        files = upload_part(open_store(), order.draft, Path(part.directory), **upload)
    else:
        assert isinstance(part, ExistingPart)
        if part.name != order.draft.name:
            raise ConfigError(
                f"The files of rank {order.rank} lie in {part.name!r}, but the checkpoint is {order.draft.name!r}: "
                "with CheckpointUploadMode.NO_UPLOAD all ranks must write to one directory of the run."
            )
        files = reference_existing(open_store(), part.name, on_bytes=on_bytes)
    return files, sent_bytes

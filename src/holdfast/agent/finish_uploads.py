"""What an agent does when its controller has died: finish the uploads that were ordered, so that nothing that `report`
accepted is lost with the driver.

When all files of a rank are in storage, a part record of it is left in the draft (`checkpoint.part_records`); the next
controller commits from these. It may also shut the draft, on this machine or another, and so may a controller that is
alive after all and has given the checkpoint up. So the draft is looked at from time to time, and uploads to one that is
not open any more stop. `agent` sets the time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from itertools import count
from typing import TypeVar

from holdfast.agent.parts import OpenStore, Ordered, Parts
from holdfast.core.backoff import backoff_s
from holdfast.core.checkpoint_types import Draft
from holdfast.errors import CheckpointError, HoldfastError, OutOfSpace, Unavailable
from holdfast.storage.store import Store
from holdfast.wire.messages import Uploaded, UploadFailed

__all__ = ["finish_uploads"]

_PAUSE_BASE_S = 0.2
_PAUSE_MAX_S = 5.0
_LOOK_S = 1.0
"""How often the draft is looked at."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


async def finish_uploads(parts: Parts, open_store: OpenStore, executor: Executor, threads: int) -> None:
    """Returns when each upload that was ordered is recorded, or has failed for good, or is not wanted any more."""
    work = _Finishing(parts, open_store, executor, threads)
    drafts = {one.order.draft.token: one.order.draft for one in parts.ordered}
    looking = [asyncio.ensure_future(work.watch(draft)) for draft in drafts.values()]
    try:
        await asyncio.gather(*(work.finish(one) for one in parts.ordered))
    finally:
        for one in looking:
            one.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
    for draft in drafts.values():
        # Checked once more: it may have been closed meanwhile, and its files removed before ours were there.
        if draft in work.shut or not await work.is_open(draft):
            await work.remove_files(draft)


class _Finishing:
    def __init__(self, parts: Parts, open_store: OpenStore, executor: Executor, threads: int) -> None:
        self._parts = parts
        self._open_store = open_store
        self._executor = executor
        self._threads = threads
        self.shut: list[Draft] = []
        """The drafts that were found not to be open any more."""

    async def finish(self, one: Ordered) -> None:
        """Wait for one upload, repeat it while its error is transient, and write its part record."""
        from holdfast.checkpoint.part_records import write_part_record

        order = one.order
        info = order.info
        assert info is not None
        work = one.work

        async def upload() -> Uploaded:
            nonlocal work
            if work.done() and isinstance(work.result(), UploadFailed):
                work = self._parts.start_upload(order, self._open_store, self._threads)
            answer = await asyncio.shield(work)
            if isinstance(answer, Uploaded):
                return answer
            if answer.kind.is_transient and order.draft not in self.shut:
                raise Unavailable(answer.error)
            raise CheckpointError(f"The part of rank {order.rank} of {order.draft.name} is lost: {answer.error}")

        uploaded = await self._retry(upload)
        if uploaded is None:
            return
        files = uploaded.files

        def write(store: Store) -> bool:
            return write_part_record(store, order.draft, info, order.rank, files, generation=order.ticket.generation)

        await self._ask(write)

    async def watch(self, draft: Draft) -> None:
        """Until the draft is not open any more; its uploads are then abandoned."""
        while await self.is_open(draft):
            await asyncio.sleep(_LOOK_S)
        self.shut.append(draft)
        self._parts.abandon_draft(draft.token)

    async def is_open(self, draft: Draft) -> bool:
        """Whether the draft may still be committed."""
        from holdfast.checkpoint.part_records import is_open

        return bool(await self._ask(lambda store: is_open(store, draft)))

    async def remove_files(self, draft: Draft) -> None:
        """Remove what was uploaded after a tombstone had closed the draft: its writer removed earlier files only."""
        from holdfast.checkpoint.catalog import Catalog
        from holdfast.checkpoint.deletion import delete_files
        from holdfast.checkpoint.reservation import is_reserved_by

        def remove(store: Store) -> None:
            found = Catalog(store).read_manifest(draft.name).manifest
            if found is not None and found.void and found.token == draft.token:
                delete_files(store, draft.name, partial(is_reserved_by, store, draft.name, draft.token))

        await self._ask(remove)

    async def _ask(self, action: Callable[[Store], _T]) -> _T | None:
        """Do something with storage in a thread, again while the error is transient; None if it fails otherwise."""
        loop = asyncio.get_running_loop()
        return await self._retry(lambda: loop.run_in_executor(self._executor, lambda: action(self._open_store())))

    async def _retry(self, action: Callable[[], Awaitable[_T]]) -> _T | None:
        """Until it succeeds, or fails for good, which gives None; `agent` sets the time limit."""
        for failures in count(1):
            try:
                return await action()
            except (Unavailable, OutOfSpace):
                await asyncio.sleep(backoff_s(failures, _PAUSE_BASE_S, _PAUSE_MAX_S))
            except HoldfastError as error:
                _log.warning("%s", error)
                return None
        raise AssertionError

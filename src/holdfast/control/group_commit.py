"""One flush of a lease's journal for all runs that wait for one: group commit.

A journal belongs to a lease, and a lease may have many guests (the trials of an experiment). Whoever asks for a flush
while one is under way is served by the next, together with everybody else who asked meanwhile: the number of flushes
does not grow with the number of guests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast.core.records import Record
from holdfast.journal.reader import JournalReader, Mark
from holdfast.journal.writer import Journal

__all__ = ["GroupCommit", "RunJournal"]

_INDEX_RECORDS = 1_000
"""So often it is noted where in the journal a run's records are."""


class GroupCommit:
    """Appends to a journal, and flushes it in a thread of its own. Used from the hub's event loop only."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._thread = ThreadPoolExecutor(1, "holdfast-journal")
        """A disk that stalls must not stall the event loop. A thread of its own: storage work may fill the others."""
        self._flushing: asyncio.Future[None] | None = None
        self.on_saved: Callable[[], None] = lambda: None
        """Called in the event loop, when more of the journal has become durable."""

    async def flush(self) -> None:
        """Make everything durable that was appended before this call; raises `StorageError`."""
        last = self.journal.appended
        while self.journal.saved < last:
            if self._flushing is None or self._flushing.done():
                loop = asyncio.get_running_loop()
                self._flushing = loop.run_in_executor(self._thread, self.journal.flush)
                self._flushing.add_done_callback(self._flushed)
            await asyncio.shield(self._flushing)

    def _flushed(self, flushing: asyncio.Future[None]) -> None:
        if not flushing.cancelled() and flushing.exception() is None:
            self.on_saved()

    def close(self) -> None:
        """The last guest has left: leave the journal tidy."""
        self._thread.shutdown()
        self.journal.close()


class RunJournal:
    """One run's end of its lease's journal: what it appends carries its id, and what it reads back is its own."""

    def __init__(self, commit: GroupCommit, run: str) -> None:
        self._commit = commit
        self._journal = commit.journal
        self._run = run
        self._count = 0
        """How many records the run has appended."""
        self._last = 0
        """The number of the last one in the lease's journal."""
        self._index: list[tuple[int, int]] = []
        """How many records the run had, and the number of the journal's last record, before some of its appends."""

    @property
    def dirty(self) -> bool:
        """Whether some record of the run is not durable."""
        return self._last > self._journal.saved

    @property
    def unsaved_records(self) -> int:
        return self._journal.appended - self._journal.saved

    def append(self, records: Sequence[Record]) -> None:
        if not records:
            return
        if not self._index or self._count - self._index[-1][0] >= _INDEX_RECORDS:
            self._index.append((self._count, self._journal.appended))
        self._journal.append(records, self._run)
        self._count += len(records)
        self._last = self._journal.appended

    async def flush(self) -> None:
        """Make the run's records durable, and with them those of every other guest; raises `StorageError`."""
        await self._commit.flush()

    def read_back(self, after: int) -> Iterator[tuple[int, Record]]:
        """The run's own records of this lease after the n-th, each with its number among them; from any thread."""
        count, before = max((one for one in list(self._index) if one[0] <= after), default=(0, 0))
        mark = Mark(self._journal.epoch, self._journal.lease, before)
        for _, line in JournalReader(self._journal.store, run=self._run, shared=True).read(mark):
            count += 1
            if count > after:
                yield count, line.record

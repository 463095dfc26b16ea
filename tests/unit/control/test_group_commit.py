"""Runs that share a lease's journal: one flush for all who wait, and each run's records are its own."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest
from tests.unit.control.histories import history

from holdfast.control.group_commit import GroupCommit, RunJournal
from holdfast.core.records import Record, RunInterrupted
from holdfast.core.summary import summarize
from holdfast.errors import Unavailable
from holdfast.journal import reader
from holdfast.journal.reader import JournalReader
from holdfast.journal.writer import Journal
from holdfast.storage.posix.store import PosixStore

LEASE = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "run")


def record(why: str) -> Record:
    return RunInterrupted(at=1.0, why=why)


class CountedJournal(Journal):
    """Counts flushes, each of which waits until it may go on."""

    def __init__(self, store: PosixStore) -> None:
        super().__init__(store, 1, LEASE)
        self.flushes = 0
        self.is_flushing, self.may_flush = threading.Event(), threading.Event()
        self.failing = False

    def flush(self) -> None:
        self.flushes += 1
        self.is_flushing.set()
        assert self.may_flush.wait(30)
        if self.failing:
            raise Unavailable("no storage")
        super().flush()


def test_one_flush_serves_all_guests_that_wait(store: PosixStore) -> None:
    journal = CountedJournal(store)
    commit = GroupCommit(journal)
    guests = [RunJournal(commit, f"run-{n}") for n in range(50)]

    async def main() -> None:
        first = RunJournal(commit, "first")
        first.append([record("first")])
        waiting = [asyncio.create_task(first.flush())]
        await asyncio.to_thread(journal.is_flushing.wait, 30)
        for guest in guests:
            guest.append([record("a"), record("b")])
            waiting.append(asyncio.create_task(guest.flush()))
        await asyncio.sleep(0)
        journal.may_flush.set()
        await asyncio.gather(*waiting)
        assert not any(guest.dirty for guest in guests)

    asyncio.run(main())
    commit.close()
    # The first flush may or may not have had the others' records already: it looks when it begins to write.
    assert journal.flushes <= 2
    assert len(list(JournalReader(store).read())) == 101


def test_a_failed_flush_fails_for_everybody_who_waited_and_keeps_the_records(store: PosixStore) -> None:
    journal = CountedJournal(store)
    journal.may_flush.set()
    journal.failing = True
    commit = GroupCommit(journal)
    guests = [RunJournal(commit, f"run-{n}") for n in range(3)]

    async def main() -> None:
        for guest in guests:
            guest.append([record("a")])
        outcomes = await asyncio.gather(*(guest.flush() for guest in guests), return_exceptions=True)
        assert [type(one) for one in outcomes] == [Unavailable] * 3
        assert all(guest.dirty for guest in guests)
        journal.failing = False
        await guests[1].flush()
        assert not any(guest.dirty for guest in guests)

    asyncio.run(main())
    commit.close()
    assert [line.run for _, line in JournalReader(store).read()] == ["run-0", "run-1", "run-2"]


@pytest.mark.parametrize("seed", range(10))
def test_each_run_of_a_shared_journal_folds_to_what_it_is_alone(
    store: PosixStore, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the journal is read back from somewhere in its middle."""
    monkeypatch.setattr("holdfast.control.group_commit._INDEX_RECORDS", 7)
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 700)
    random_ = random.Random(seed)
    histories = {f"run-{n}": history(seed * 10 + n, controllers=1, reports=20)[0] for n in range(4)}
    commit = GroupCommit(Journal(store, 1, LEASE))
    guests = {run: RunJournal(commit, run) for run in histories}
    left = {run: list(records) for run, records in histories.items()}

    async def main() -> None:
        while any(left.values()):
            run = random_.choice([run for run, records in left.items() if records])
            count = random_.randint(1, 3)
            guests[run].append(left[run][:count])
            del left[run][:count]
            if random_.random() < 0.3:
                await guests[run].flush()
        await commit.flush()

    asyncio.run(main())
    commit.close()
    for run, records in histories.items():
        found = [line.record for _, line in JournalReader(store, run=run, shared=True).read()]
        assert summarize(found) == summarize(records)
        after = random_.randrange(len(records))
        assert list(guests[run].read_back(after)) == list(enumerate(records[after:], after + 1))

"""Observers get every record once and in order, however slow they are, with bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.control import publisher as module
from holdfast.control.publisher import Publisher
from holdfast.core.records import Record, Reported
from holdfast.errors import Unavailable
from holdfast.journal.reader import JournalReader, Mark
from holdfast.journal.writer import Journal
from holdfast.storage.posix.store import PosixStore
from holdfast.wire.messages import LogLine

LEASE = "0123456789abcdef"


class Slow:
    """Waits at its first record until it is let go."""

    next_flush_s: float | None = 0.01

    def __init__(self) -> None:
        self.go = threading.Event()
        self.at_work = threading.Event()
        self.seen: list[int] = []
        self.lines: list[int] = []
        self.most_unflushed = self.unflushed = 0
        self.ended: list[bool] = []

    def record(self, record: Record) -> None:
        self.at_work.set()
        assert self.go.wait(60)
        assert isinstance(record, Reported)
        self.seen.append(record.iteration)
        self.unflushed += 1
        self.most_unflushed = max(self.most_unflushed, self.unflushed)

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        self.lines.append(generation)

    def flush(self, final: bool = False) -> None:
        self.unflushed = 0
        if final:
            self.ended.append(final)

    def close(self) -> None:
        self.ended.append(True)


def report(n: int) -> Record:
    return Reported(at=float(n), generation=1, iteration=n, metrics={})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACKLOG_RECORDS", 10)
    monkeypatch.setattr(module, "_FLUSH_RECORDS", 5)
    monkeypatch.setattr(module, "_RETRY_S", 0.01)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("failures", [0, 2])
def test_an_observer_that_is_far_behind_reads_the_journal(tmp_path: Path, failures: int) -> None:
    store = PosixStore(tmp_path / "run")
    journal = Journal(store, 1, LEASE)
    failing = [failures]

    def read_back(after: int) -> Iterator[tuple[int, Record]]:
        for mark, line in JournalReader(store).read(Mark(1, LEASE, after)):
            yield mark.n, line.record
            if failing[0] and mark.n % 40 == 0:
                failing[0] -= 1
                raise Unavailable("not now")

    slow, quick = Slow(), Slow()
    quick.go.set()
    publisher = Publisher([slow, quick], read_back)
    wanted = list(range(1, 401))
    for n in wanted:
        journal.append([report(n)])
        publisher.hold([report(n)])
        journal.flush()
        publisher.release()
        if n == 1:
            assert slow.at_work.wait(60)
        if n == 200:
            slow_thread = publisher._threads[0]
            assert slow_thread._waiting <= 11 and len(slow_thread._queue) <= 13
            slow.go.set()
        if n % 100 == 0:
            publisher.logs(n, [])
    publisher.close()
    journal.close()
    assert slow.seen == quick.seen == wanted
    assert sorted(slow.lines) == [100, 200, 300, 400]
    assert slow.most_unflushed <= 6 + 1
    assert slow.ended == [True, True]


@pytest.mark.usefixtures("small")
def test_records_that_the_journal_lost_do_not_hold_up_an_observer(tmp_path: Path) -> None:
    slow = Slow()
    publisher = Publisher([slow], lambda after: ((n, report(n)) for n in range(after + 1, 50) if n != 30))
    for n in range(1, 61):
        publisher.hold([report(n)])
        publisher.release()
    slow.go.set()
    publisher.close()
    assert slow.seen == [n for n in range(1, 50) if n != 30]


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_an_observer_that_fails_is_switched_off_alone(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(Slow):
        def record(self, record: Record) -> None:
            raise kind("a bug")

    bad, good = Bad(), Slow()
    good.go.set()
    publisher = Publisher([bad, good])
    for n in range(1, 20):
        publisher.hold([report(n)])
        publisher.release()
    publisher.wait_for(Bad)  # for ever, if it did not know
    publisher.close()
    assert good.seen == list(range(1, 20))
    assert bad.ended == []
    assert "Bad failed and is switched off" in caplog.text


class Blocked(Slow):
    """Cannot write at first, as result files on a disk that is full."""

    def __init__(self) -> None:
        super().__init__()
        self.go.set()
        self.works = threading.Event()
        self.tries = 0
        self.tried = threading.Event()

    def flush(self, final: bool = False) -> bool:  # type: ignore[override]
        super().flush(final)
        self.tries += 1
        if self.tries > 20:
            self.tried.set()
        return self.works.is_set()


@pytest.mark.usefixtures("small")
def test_an_observer_that_cannot_write_gets_no_more_records_until_it_can(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    journal = Journal(store, 1, LEASE)

    def read_back(after: int) -> Iterator[tuple[int, Record]]:
        for mark, line in JournalReader(store).read(Mark(1, LEASE, after)):
            yield mark.n, line.record

    observer = Blocked()
    publisher = Publisher([observer], read_back)
    for n in range(1, 501):
        journal.append([report(n)])
        journal.flush()
        publisher.hold([report(n)])
        publisher.release()
        publisher.logs(n, [])
    assert observer.tried.wait(60)
    assert len(observer.seen) < 100
    assert len(publisher._threads[0]._queue) < 100
    observer.works.set()
    publisher.close()
    journal.close()
    assert observer.seen == list(range(1, 501))


class Idle(Slow):
    """Has nothing to do but take what comes."""

    next_flush_s = None

    def __init__(self) -> None:
        super().__init__()
        self.go.set()
        self.flushes = 0
        self.flushed = threading.Event()

    def flush(self, final: bool = False) -> None:
        self.flushes += 1
        self.flushed.set()


def test_an_observer_that_waits_for_nothing_is_not_woken() -> None:
    class Other(Idle):
        pass

    idle, other = Idle(), Other()
    publisher = Publisher([idle, other])
    publisher.hold([report(1)])
    publisher.release()
    for kind in (Idle, Other):
        publisher.wait_for(kind)
    thread = publisher._threads[0]
    assert thread._until_flush_s() is None and idle.flushes == 0
    publisher.wake(Other)
    assert other.flushed.wait(60)
    assert idle.flushes == 0, "only the one that was woken flushes"
    publisher.close()
    assert idle.flushes == 1, "at the end"


def test_an_observer_is_flushed_when_it_says() -> None:
    class Soon(Idle):
        @property
        def next_flush_s(self) -> float | None:  # type: ignore[override]
            return 0.01 if self.seen and not self.flushes else None

    soon = Soon()
    publisher = Publisher([soon])
    publisher.hold([report(1)])
    publisher.release()
    assert soon.flushed.wait(60)
    publisher.wait_for(Soon)
    assert publisher._threads[0]._until_flush_s() is None
    publisher.close()
    assert soon.flushes == 2

"""Result files over several controllers: each continues where the last one stopped, and a fenced one changes
nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.control.histories import history
from tests.unit.files.shown import T0, CountingStore, begin, commit, generation, report, reports

from holdfast.control.lease import Lease, acquire
from holdfast.core import records as r
from holdfast.errors import Unavailable
from holdfast.journal.reader import JournalReader
from holdfast.journal.writer import Journal
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.retry import RetryingStore
from holdfast.storage.store import Digest, Entry, OnBytes, Source
from holdfast.views.files import results as module
from holdfast.views.files.results import ResultFiles

LEASES = ("", "0123456789abcdef", "fedcba9876543210", "00ff00ff00ff00ff")
Make = Callable[[Path], PosixStore]


@pytest.fixture(params=[PosixStore, CountingStore])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def journal(store: PosixStore, epoch: int, records: list[r.Record]) -> None:
    made = Journal(store, epoch, LEASES[epoch])
    made.append(records)
    made.flush()
    made.close()


def files_of(store: PosixStore, epoch: int, **options: Any) -> ResultFiles:
    return ResultFiles(store, JournalReader(store), epoch=epoch, lease=LEASES[epoch], **options)


def shown(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in ("result.json", "progress.csv")}


def made_again(root: Path, records: list[list[r.Record]], scratch: Path) -> dict[str, bytes]:
    """The same files from all records at once."""
    store = PosixStore(scratch)
    files = files_of(store, 1)
    for part in records:
        for record in part:
            files.record(record)
    files.flush(final=True)
    files.close()
    return shown(scratch)


@pytest.mark.parametrize("seed", range(7))
def test_continued_files_equal_files_made_from_the_whole_journal(
    make: Make, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAVE_ROWS", 3)
    records = history(seed)
    store = make(tmp_path / "run")
    resumed = []
    resume = ResultFiles._resume

    def counted(self: ResultFiles, *arguments: Any) -> bool:
        resumed.append(resume(self, *arguments))
        return resumed[-1]

    monkeypatch.setattr(ResultFiles, "_resume", counted)
    now = [0.0]
    for epoch, part in enumerate(records, start=1):
        journal(store, epoch, part)
        now[0] += 1000.0
        files = files_of(store, epoch, clock=lambda: now[0])
        killed = len(part) - 1 - seed % 5  # the rest is in the journal, and not in the files
        for n, record in enumerate(part[:killed]):
            files.record(record)
            if n % 7 == seed % 7:
                now[0] += 100.0
                files.flush()
        if epoch == len(records):
            for record in part[killed:]:
                files.record(record)
            files.flush(final=True)
        files.close()
    assert any(resumed)
    monkeypatch.setattr(module, "_HOLD_S", -1.0)
    wanted = made_again(tmp_path / "run", records, tmp_path / "scratch")
    found = shown(tmp_path / "run")
    strip = _without_names
    assert strip(found["result.json"]) == strip(wanted["result.json"])
    assert len(found["progress.csv"].splitlines()) == len(wanted["progress.csv"].splitlines())
    assert [line.split(b",")[0] for line in found["progress.csv"].splitlines()] == [
        line.split(b",")[0] for line in wanted["progress.csv"].splitlines()
    ]


def _without_names(data: bytes) -> list[bytes]:
    """Names of checkpoints are there if they were known soon enough."""
    return [line.partition(b',"checkpoint_dir_name"')[0].rstrip(b"}") for line in data.splitlines()]


@pytest.mark.parametrize("harm", ["shorter", "altered", "gone", "note torn", "longer"])
def test_files_changed_by_others_are_made_again(
    make: Make, harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAVE_ROWS", 3)
    store = make(tmp_path / "run")
    first = [begin(), *generation(1), *reports(1, 20)]
    journal(store, 1, first)
    files = files_of(store, 1)
    for record in first:
        files.record(record)
    files.flush(final=True)
    files.close()
    wanted = shown(tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    match harm:
        case "shorter":
            path.write_bytes(path.read_bytes()[:-40])
        case "altered":
            path.write_bytes(path.read_bytes().replace(b'"n":20', b'"n":99'))
        case "gone":
            path.unlink()
        case "note torn":
            (note,) = (tmp_path / "run" / "journal").glob("*.views.json")
            note.write_bytes(note.read_bytes()[:-5])
        case "longer":
            path.write_bytes(path.read_bytes() + b"what a fenced controller appended\n")
    second = files_of(store, 2)
    second.record(begin(2, T0 + 50))
    second.flush(final=True)
    second.close()
    assert shown(tmp_path / "run") == wanted


def test_a_restart_reads_only_the_records_that_the_files_do_not_have(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "run")
    first: list[r.Record] = [begin(), *generation(1)]
    first += [report(n, T0 + n, {"n": n}) for n in range(1, 3001)]
    journal(store, 1, first)
    files = files_of(store, 1)
    for record in first[:-10]:
        files.record(record)
    files.flush(final=True)
    files.close()
    read: list[int] = []
    original = JournalReader.read

    def counted(self: JournalReader, *arguments: Any) -> Any:
        for mark, line in original(self, *arguments):
            read.append(line.n)
            yield mark, line

    monkeypatch.setattr(JournalReader, "read", counted)
    second = files_of(store, 2)
    second.record(begin(2, T0 + 9999))
    second.flush(final=True)
    second.close()
    assert read == [record + 1 for record in range(len(first) - 10, len(first))]
    assert shown(tmp_path / "run")["result.json"].count(b"\n") == 3000


# ---------------------------------------------------------------- fenced


def test_a_fenced_controller_changes_no_file(make: Make, tmp_path: Path) -> None:
    """It looked at the fence before its successor came, and writes afterwards: rows, a rollback, new columns."""
    store = make(tmp_path / "run")
    first = [begin(), *generation(1), *reports(1, 5), commit(3, T0 + 3)]
    journal(store, 1, first)
    fence = [False]
    now = [0.0]
    old = files_of(store, 1, fenced=lambda: fence[0], clock=lambda: now[0])
    for record in first:
        old.record(record)
    old.flush()
    new = files_of(store, 2)
    for record in [begin(2, T0 + 50), *generation(2, 3, T0 + 51), *reports(4, 6, T0 + 51, 2)]:
        new.record(record)
    new.flush()
    wanted = shown(tmp_path / "run")
    late: list[Any] = [*reports(6, 9), *generation(2, 3, T0 + 20), report(4, T0 + 30, {"new": 1})]

    def fenced_after_one_look() -> bool:
        before, fence[0] = fence[0], True
        return before

    old._fenced = fenced_after_one_look
    now[0] += 1000.0
    for record in late:
        old.record(record)
    old.flush()
    old.flush(final=True)
    old.close()
    assert shown(tmp_path / "run") == wanted
    new.flush(final=True)
    new.close()
    assert shown(tmp_path / "run") == wanted
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".tmp")] == []


def test_nothing_is_written_while_the_fence_cannot_be_checked(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path / "run")
    files = files_of(store, 1, fenced=lambda: True)
    for record in [begin(), *generation(1), *reports(1, 5), r.RunFailed(at=T0 + 9, error="bad")]:
        files.record(record)
    files.flush(final=True)
    files.close()
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []


def test_late_writes_of_a_fenced_controller_are_corrected_at_the_end(tmp_path: Path) -> None:
    """A request of the old controller that was under way arrives after the new one's: the new one looks at the end."""
    store = CountingStore(tmp_path / "run")
    first = [begin(), *generation(1), *reports(1, 5)]
    journal(store, 1, first)
    new = files_of(store, 2)
    for record in [begin(2, T0 + 50), *generation(2, 5, T0 + 51), *reports(6, 8, T0 + 51, 2)]:
        new.record(record)
    new.flush()
    wanted = shown(tmp_path / "run")
    for name in wanted:
        store.put(name, b"the old one's\n")
    store.put("error.txt", b"the old one's\n")
    new.flush(final=True)
    new.close()
    assert shown(tmp_path / "run") == wanted
    assert not (tmp_path / "run" / "error.txt").exists()


def test_a_removed_result_file_is_written_again(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    files = files_of(store, 1)
    for record in [begin(), *generation(1), *reports(1, 5)]:
        files.record(record)
    files.flush()
    (tmp_path / "run" / "result.json").unlink()
    shutil.copy(tmp_path / "run" / "progress.csv", tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / "run" / "progress.csv")
    for record in reports(6, 7):
        files.record(record)
    files.flush(final=True)
    files.close()
    assert shown(tmp_path / "run")["result.json"].count(b"\n") == 7
    assert shown(tmp_path / "run")["progress.csv"].count(b"\n") == 8


def test_retries_of_a_fenced_controller_do_not_replace_files_after_an_outage(tmp_path: Path) -> None:
    """The old controller's storage does not answer for longer than its lease lasts; a successor, whose does, takes
    over and finishes; then the line is mended while the old one is trying again."""
    direct = CountingStore(tmp_path / "run")
    line = CutLine(tmp_path / "run")
    old_lease = acquire(direct)
    now = [0.0]
    mended: list[dict[str, bytes]] = []

    def wait(_: float) -> None:
        line.failures += 1
        if line.failures < 30 or mended:
            return
        second = [begin(2, T0 + 50), *generation(2, 5, T0 + 51), *reports(6, 8, T0 + 51, 2)]
        lease = acquire(direct, takeover=True)
        new = files_of(direct, 2, fenced=lease.is_fenced)
        for record in second:
            new.record(record)
        new.flush(final=True)
        new.close()
        mended.append(shown(tmp_path / "run"))
        line.cut = False

    far = RetryingStore(line, sleep=wait, uniform=lambda low, high: 0.0)
    lease = Lease(far, old_lease._own, old_lease.floor)
    first = [begin(), *generation(1), *reports(1, 5)]
    journal(direct, 1, first)
    old = ResultFiles(
        far, JournalReader(direct), epoch=1, lease=LEASES[1], fenced=lease.is_fenced, clock=lambda: now[0]
    )
    for record in first:
        old.record(record)
    old.flush()
    line.cut = True
    for record in [*reports(6, 7), r.RunFailed(at=T0 + 9, error="bad")]:
        old.record(record)
    while not mended:
        now[0] += 100.0
        old.flush()
    for _ in range(3):
        now[0] += 100.0
        old.flush(final=True)
    old.close()
    assert shown(tmp_path / "run") == mended[0]
    assert not (tmp_path / "run" / "error.txt").exists()


class CutLine(CountingStore):
    """A bucket behind a line that can be cut."""

    cut = False
    failures = 0

    def _check(self) -> None:
        if self.cut:
            raise Unavailable("no answer came")

    def size(self, key: str) -> int:
        self._check()
        return super().size(key)

    def put(self, key: str, data: bytes) -> None:
        self._check()
        super().put(key, data)

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        self._check()
        return super().upload(key, source, on_bytes)

    def version(self, key: str) -> str | None:
        self._check()
        return super().version(key)

    def list(self, prefix: str = "") -> list[Entry]:
        self._check()
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._check()
        super().delete(keys)


def test_files_are_written_without_o_tmpfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "no links in this sandbox")

    monkeypatch.setattr("holdfast.views.files.sinks.link_open_file", refused)
    monkeypatch.setattr("holdfast.storage.posix.atomic_file.AtomicFile.unnamed", True)
    files = files_of(PosixStore(tmp_path / "run"), 1)
    for record in [begin(), *generation(1), *reports(1, 5)]:
        files.record(record)
    files.flush()
    files.record(report(6, T0 + 6, {"new": 1}))
    files.flush(final=True)
    files.close()
    assert shown(tmp_path / "run")["result.json"].count(b"\n") == 6
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".tmp")] == []

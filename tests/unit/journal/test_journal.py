"""The journal gives back what was written, once and in order, and nothing that a fenced controller added."""

from __future__ import annotations

import logging
import math
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.mounts import tmpfs

from holdfast.core.records import CheckpointCommitted, Record, Reported, RunFinished
from holdfast.errors import NotFound, StorageError, Unavailable
from holdfast.journal import writer as module
from holdfast.journal.format import encode_header, encode_line, encode_record
from holdfast.journal.reader import START, JournalReader, Mark, Position, position
from holdfast.journal.writer import Journal
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Entry

LEASE = "0123456789abcdef"
OTHER = "fedcba9876543210"


def read_records(store: PosixStore, cuts: Sequence[tuple[int, Position]] = ()) -> list[Record]:
    return [line.record for _, line in JournalReader(store, cuts).read()]


class Remote(PosixStore):
    """A store whose keys are no files to its users, as in a bucket."""

    @property
    def local_root(self) -> Path | None:
        return None


class Slow(Remote):
    """A bucket behind a line on which requests can be delayed: they arrive, after newer ones."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.delayed: list[tuple[str, bytes]] = []
        self.delay = False

    def put(self, key: str, data: bytes) -> None:
        if self.delay:
            self.delayed.append((key, data))
            raise Unavailable("no answer came")
        super().put(key, data)

    def deliver(self) -> None:
        for key, data in self.delayed:
            super().put(key, data)


@pytest.fixture(params=[PosixStore, Remote])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> PosixStore:
    made: PosixStore = request.param(tmp_path / "run")
    return made


def report(iteration: int, loss: float = 0.5) -> Record:
    return Reported(at=float(iteration), generation=1, iteration=iteration, metrics={"loss": loss})


def commit(iteration: int) -> Record:
    return CheckpointCommitted(
        at=float(iteration),
        name=f"checkpoint_{iteration}",
        index=iteration,
        iteration=iteration,
        generation=1,
        metrics={},
    )


def write(store: PosixStore, epoch: int, records: list[Record], lease: str = LEASE, run: str = "") -> None:
    journal = Journal(store, epoch, lease)
    for record in records:
        journal.append([record], run)
        journal.flush()
    journal.close()


def keys(store: PosixStore) -> list[str]:
    return [entry.key for entry in store.list("journal")]


def test_records_are_read_in_order(store: PosixStore) -> None:
    records = [report(n) for n in range(1, 20)]
    write(store, 1, records[:10])
    write(store, 2, records[10:], OTHER)
    assert read_records(store) == records


def test_a_short_segment_is_read_by_one_request(tmp_path: Path) -> None:
    class Counting(PosixStore):
        reads = 0

        def get_range(self, key: str, start: int, length: int) -> bytes:
            self.reads += 1
            return super().get_range(key, start, length)

    store, records = Counting(tmp_path / "run"), [report(1), report(2)]
    write(store, 1, records)
    store.reads = 0
    assert read_records(store) == records
    assert store.reads == 1


def test_a_large_segment_is_followed_by_a_new_one(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 300)
    monkeypatch.setattr(module, "FILE_SEGMENT_BYTES", 300)
    records = [report(n) for n in range(1, 60)]
    write(store, 1, records)
    assert len(keys(store)) > 5
    assert read_records(store) == records
    for n in range(1, 60):
        after = Mark(1, LEASE, n)
        assert [line.record for _, line in JournalReader(store).read(after)] == records[n:]


def test_each_record_carries_its_number_and_its_run(store: PosixStore) -> None:
    write(store, 1, [report(n) for n in range(1, 5)], run="abcd")
    assert [(line.n, line.run) for _, line in JournalReader(store).read()] == [(n, "abcd") for n in range(1, 5)]


def test_records_of_another_run_are_skipped_with_a_warning(store: PosixStore, caplog: pytest.LogCaptureFixture) -> None:
    write(store, 1, [report(1)], run="mine")
    write(store, 2, [report(2)], OTHER, run="foreign")
    assert [line.record for _, line in JournalReader(store, run="mine").read()] == [report(1)]
    assert "records of another run (foreign)" in caplog.text


def test_nan_and_infinity_round_trip(store: PosixStore) -> None:
    write(store, 1, [report(1, math.nan), report(2, -math.inf), RunFinished(at=3.0, return_value=[math.inf])])
    first, second, third = read_records(store)
    assert isinstance(first, Reported) and math.isnan(first.metrics["loss"])
    assert isinstance(second, Reported) and second.metrics["loss"] == -math.inf
    assert isinstance(third, RunFinished) and third.return_value == [math.inf]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    write(store, 1, [report(1), report(2)])
    (key,) = keys(store)
    whole = store.get(key)
    for cut in range(2, 40):
        store.put(key, whole[:-cut])
        assert read_records(store) == [report(1)]


def test_segments_of_the_format_without_checksums_are_read(store: PosixStore) -> None:
    old = [report(1), report(2), report(3)]
    lines = [encode_record(record) + b"\n" for record in old]
    store.put("journal/000001-000000.jsonl", lines[0])
    store.put("journal/000001-000001.jsonl", lines[1] + lines[2])
    write(store, 2, [report(4)])
    assert read_records(store) == [*old, report(4)]
    cut = Position("journal/000001-000001.jsonl", len(lines[1]))
    assert read_records(store, [(2, cut)]) == [report(1), report(2), report(4)]


# ---------------------------------------------------------------- several controllers


def test_what_a_fenced_controller_adds_does_not_count(store: PosixStore) -> None:
    old = Journal(store, 1, LEASE)
    old.append([report(1)])
    old.flush()
    end = position(store)
    old.append([report(2)])
    old.flush()
    old.close()
    write(store, 2, [report(7)], OTHER)
    assert read_records(store, [(2, end)]) == [report(1), report(7)]
    assert read_records(store, [(2, Position())]) == [report(7)]


def test_a_fenced_controller_that_merges_late_changes_nothing(tmp_path: Path) -> None:
    """Its merged segment holds records on both sides of the cut, and the small ones are gone."""
    store = Remote(tmp_path / "run")
    old = Journal(store, 1, LEASE)
    for n in range(1, 8):
        old.append([report(n)])
        old.flush()
    end = position(store)
    before = keys(store)
    old.append([report(8), commit(8)])
    old.flush()
    assert not set(before) & set(keys(store)), "it has merged them"
    write(store, 2, [report(9)], OTHER)
    assert read_records(store, [(2, end)]) == [*(report(n) for n in range(1, 8)), report(9)]


def test_a_journal_can_be_cut_after_any_record(store: PosixStore) -> None:
    random_ = random.Random(1)
    old = Journal(store, 1, LEASE)
    ends = []
    records = [commit(n) if random_.random() < 0.2 else report(n) for n in range(1, 60)]
    for n, record in enumerate(records, start=1):
        old.append([record])
        old.flush()
        ends.append((n, position(store)))
    old.close()
    for n, end in ends:
        assert read_records(store, [(2, end)]) == records[:n]


def test_only_the_lease_that_won_an_epoch_counts(store: PosixStore, caplog: pytest.LogCaptureFixture) -> None:
    """Where two controllers believed to have the same epoch, its file names the one."""
    write(store, 1, [report(1), report(2)], LEASE)
    write(store, 1, [report(7)], OTHER)
    store.put("epochs/000001.json", b'{"epoch":1,"id":"%b"}' % LEASE.encode())
    assert read_records(store) == [report(1), report(2)]
    assert "lost the race to be number 1" in caplog.text


# ---------------------------------------------------------------- requests that come late, or twice


def test_a_delayed_put_does_not_remove_records(tmp_path: Path) -> None:
    store = Slow(tmp_path / "run")
    journal = Journal(store, 1, LEASE)
    journal.append([report(1)])
    journal.flush()
    store.delay = True
    for n in (2, 3):
        journal.append([report(n)])
        with pytest.raises(Unavailable):
            journal.flush()
    store.delay = False
    journal.append([report(4)])
    while journal.saved < journal.appended:
        journal.flush()
    expected = [report(n) for n in range(1, 5)]
    assert read_records(store) == expected
    store.deliver()
    assert read_records(store) == expected
    journal.append([commit(5), *(report(n) for n in range(6, 9))])
    journal.flush()
    journal.close()
    store.deliver()
    assert read_records(store) == [*expected, commit(5), *(report(n) for n in range(6, 9))]


def test_no_key_is_ever_written_with_other_bytes(tmp_path: Path) -> None:
    """With failures and merges anywhere: whatever arrives twice, early or late, is the same."""

    class Watched(Remote):
        failures = random.Random(3)
        seen: dict[str, bytes]

        def put(self, key: str, data: bytes) -> None:
            assert self.seen.setdefault(key, data) == data, key
            if self.failures.random() < 0.3:
                raise Unavailable("no answer came")
            super().put(key, data)
            if self.failures.random() < 0.2:
                raise Unavailable("the answer was lost")

    store = Watched(tmp_path / "run")
    store.seen = {}
    journal = Journal(store, 1, LEASE)
    records: list[Record] = []
    for n in range(1, 300):
        records.append(commit(n) if n % 11 == 0 else report(n))
        journal.append([records[-1]])
        for _ in range(n % 3):
            try:
                journal.flush()
            except Unavailable:
                continue
    while journal.saved < journal.appended:
        try:
            journal.flush()
        except Unavailable:
            continue
    assert read_records(store) == records
    rng = random.Random(4)
    late = list(store.seen.items())
    rng.shuffle(late)
    for key, data in late:
        PosixStore.put(store, key, data)
    assert read_records(store) == records


def test_small_segments_are_merged_at_commits(tmp_path: Path) -> None:
    store = Remote(tmp_path / "run")
    journal = Journal(store, 1, LEASE)
    records: list[Record] = []
    for n in range(1, 61):
        records.append(commit(n) if n % 20 == 0 else report(n))
        journal.append([records[-1]])
        journal.flush()
        assert read_records(store) == records
        assert len(keys(store)) <= 20
    journal.close()
    assert len(keys(store)) == 1


def test_a_reader_lists_again_when_a_segment_was_merged_meanwhile(tmp_path: Path) -> None:
    class Listed(Remote):
        """Its first listing is of the time before the merge."""

        old: list[Entry] | None = None

        def list(self, prefix: str = "") -> list[Entry]:
            old, self.old = self.old, None
            return old if old is not None and prefix == "journal" else super().list(prefix)

    store = Listed(tmp_path / "run")
    journal = Journal(store, 1, LEASE)
    records = [report(n) for n in range(1, 10)]
    for record in records:
        journal.append([record])
        journal.flush()
    before = store.list("journal")
    journal.append([commit(10)])
    journal.flush()
    store.old = before
    assert read_records(store) == [*records, commit(10)]


def test_a_failed_flush_is_retried_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PosixStore(tmp_path / "run")
    journal = Journal(store, 1, LEASE)
    journal.append([report(1)])
    journal.flush()
    journal.append([report(2)])

    def broken(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", broken)
        with pytest.raises(StorageError):
            journal.flush()
    journal.append([report(3)])
    journal.flush()
    journal.close()
    assert read_records(store) == [report(1), report(2), report(3)]


# ---------------------------------------------------------------- damage


def _flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_runs_of_one_lease_share_its_journal(store: PosixStore, caplog: pytest.LogCaptureFixture) -> None:
    """What belongs to other runs is skipped without a word, and so is what names no run."""
    journal = Journal(store, 1, LEASE)
    for n in range(1, 7):
        journal.append([report(n)], "even" if n % 2 == 0 else "odd")
    journal.append([report(7)])
    journal.flush()
    journal.close()
    for run, expected in (("even", [2, 4, 6]), ("odd", [1, 3, 5])):
        found = [line for _, line in JournalReader(store, run=run, shared=True).read()]
        assert [(line.n, line.run) for line in found] == [(n, run) for n in expected]
    assert not caplog.records


def _history(store: PosixStore) -> list[Record]:
    """Two controllers, many segments."""
    random_ = random.Random(7)
    records: list[Record] = [commit(n) if n % 9 == 0 else report(n, random_.random()) for n in range(1, 41)]
    write(store, 1, records[:25], LEASE, "run1")
    journal = Journal(store, 2, OTHER)
    for record in records[25:]:
        journal.append([record], "run1")
        journal.flush()
    for epoch, lease in ((1, LEASE), (2, OTHER)):
        store.put(f"epochs/{epoch:06d}.json", b'{"epoch":%d,"id":"%b"}' % (epoch, lease.encode()))
    return records


def test_a_flipped_bit_loses_at_most_one_record_and_changes_none(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FILE_SEGMENT_BYTES", 1500)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1500)
    records = _history(store)
    caplog.set_level(logging.CRITICAL)
    files = {key: store.get(key) for key in keys(store)}
    random_ = random.Random(11)
    for _ in range(1000):
        key = random_.choice(list(files))
        bit = random_.randrange(len(files[key]) * 8)
        path = store._root / key
        path.write_bytes(_flip(files[key], bit))
        told: list[str] = []
        found = [line.record for _, line in JournalReader(store, run="run1", on_damage=told.append).read()]
        path.write_bytes(files[key])
        assert _is_subsequence(found, records)
        assert len(found) >= len(records) - 1
        assert told or found == records, (key, bit)


def test_a_flipped_bit_in_a_file_name_loses_no_record(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FILE_SEGMENT_BYTES", 1500)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1500)
    records = _history(store)
    caplog.set_level(logging.CRITICAL)
    random_ = random.Random(13)
    done = 0
    for _ in range(700):
        key = random_.choice(keys(store))
        name = key.removeprefix("journal/").encode()
        flipped = _flip(name, random_.randrange(len(name) * 8))
        if b"/" in flipped or b"\0" in flipped or flipped.startswith(b".") or max(flipped) > 126 or min(flipped) < 32:
            continue
        other = "journal/" + flipped.decode()
        if other in keys(store):
            continue
        (store._root / key).rename(store._root / other)
        found = read_records(store)
        assert found == records, (key, other)
        (store._root / other).rename(store._root / key)
        done += 1
    assert done > 300


def _is_subsequence(found: list[Record], whole: list[Record]) -> bool:
    rest = iter(whole)
    return all(one in rest for one in found)


@pytest.mark.parametrize(
    "name", ["notes.txt", "journal.jsonl", "000001-000000", ".hidden.jsonl", "x.fold.json", "a/b.jsonl"]
)
def test_a_stray_file_is_skipped_with_a_warning(store: PosixStore, name: str, caplog: pytest.LogCaptureFixture) -> None:
    records = [report(n) for n in range(1, 4)]
    write(store, 1, records)
    store.put(f"journal/{name}", b"what is this\n")
    assert read_records(store) == records
    assert position(store).number == 3
    assert f"{name} is no segment of this journal" in caplog.text


def test_a_lost_segment_is_reported_and_the_rest_is_read(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 300)
    monkeypatch.setattr(module, "FILE_SEGMENT_BYTES", 300)
    records = [report(n) for n in range(1, 60)]
    write(store, 1, records)
    gone = keys(store)[2]
    store.delete([gone])
    found = read_records(store)
    assert _is_subsequence(found, records)
    assert len(found) < len(records)
    assert found[-1] == records[-1]
    assert "cannot be read" in caplog.text


# ---------------------------------------------------------------- removed while it is written


def _remove(store: PosixStore) -> None:
    shutil.rmtree(store._root / "journal")


def _swap(store: PosixStore) -> None:
    (store._root / "journal").rename(store._root / "elsewhere")
    (store._root / "journal").mkdir()


@pytest.mark.parametrize("harm", [_remove, _swap])
def test_a_removed_journal_is_noticed_and_written_again(
    store: PosixStore, harm: Callable[[PosixStore], None], caplog: pytest.LogCaptureFixture
) -> None:
    losses: list[str] = []
    journal = Journal(store, 1, LEASE)
    journal.on_loss = lambda: losses.append("lost")
    records = [report(n) for n in range(1, 6)]
    for record in records:
        journal.append([record])
        journal.flush()
    harm(store)
    journal.append([commit(6)])
    journal.flush()
    assert losses == ["lost"]
    assert "removed while the run goes on" in caplog.text
    journal.append([report(7)])
    journal.flush()
    journal.close()
    assert losses == ["lost"]
    assert read_records(store) == [*records, commit(6), report(7)]


def test_a_journal_removed_right_before_close_is_noticed(store: PosixStore) -> None:
    journal = Journal(store, 1, LEASE)
    journal.append([report(1), report(2)])
    journal.flush()
    _remove(store)
    journal.close()
    assert read_records(store) == [report(1), report(2)]


def test_marks_find_their_record(store: PosixStore) -> None:
    write(store, 1, [report(n) for n in range(1, 4)])
    marks = [mark for mark, _ in JournalReader(store).read(START)]
    reader = JournalReader(store)
    assert [reader.find(mark) for mark in marks] == [mark.crc for mark in marks]
    assert reader.find(Mark(1, LEASE, 9)) is None
    assert reader.find(Mark(2, OTHER, 1)) is None
    assert JournalReader(store, [(2, Position(keys(store)[-1], 0, 2))]).find(marks[2]) is None


def test_a_missing_journal_is_empty(store: PosixStore) -> None:
    assert read_records(store) == []
    assert position(store) == Position()
    with pytest.raises(NotFound):
        store.get("journal/000001-000000.jsonl")


def test_the_lines_of_the_format_description_are_valid() -> None:
    text = (Path(__file__).parents[3] / "docs" / "store-format.md").read_bytes()
    line = encode_line(Reported(at=1763294400.5, generation=1, iteration=12, metrics={"loss": 0.25}), 17, "1a2b3c4d")
    assert encode_header(2, "5f2b0c1d9e8a4773") in text
    assert line in text


@pytest.mark.hosts
def test_a_full_disk_still_has_reserved_room_for_some_records(tmp_path: Path) -> None:
    """Retention acts upon durable records only: without that room it could not free any."""
    with tmpfs(tmp_path / "small") as place:
        _fill_and_append(place)


def _fill_and_append(place: Path) -> None:
    store = PosixStore(place / "run")
    journal = Journal(store, 1, LEASE)
    try:
        written = [report(1)]
        journal.append(written)
        journal.flush()
        with (place / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
            while True:
                ballast.write(bytes(4096))
        while sum(entry.size_bytes for entry in store.list("journal")) < 12_000:
            more = [report(len(written) + 1)]
            journal.append(more)
            journal.flush()
            written += more
        assert list(read_records(store)) == written
    finally:
        journal.close()
    (segment,) = (place / "run" / "journal").iterdir()
    assert segment.stat().st_blocks * 512 < segment.stat().st_size + 8192, "what was set aside is given back"

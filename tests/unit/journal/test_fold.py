"""A fold and the records after it give what all records give; a fold that is wrong in any way is not used."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path

import pytest
from tests.unit.control.histories import history

from holdfast.checkpoint.manifest import sealed
from holdfast.control.history import RUN_FILE, read_history
from holdfast.core import records as r
from holdfast.core.curve import effective_reports
from holdfast.core.summary import Summary, summarize
from holdfast.errors import Unavailable
from holdfast.journal import fold as module
from holdfast.journal import reader
from holdfast.journal.fold import Fold, FoldWriter, decode_sealed, encode_sealed, read_fold
from holdfast.journal.reader import JournalReader, Position
from holdfast.journal.writer import Journal
from holdfast.storage.posix.store import PosixStore

LEASES = ("", "0123456789abcdef", "fedcba9876543210", "00ff00ff00ff00ff")
KEY = f"journal/000001-{LEASES[1]}.fold.json"


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    made = PosixStore(tmp_path / "run")
    made.put(RUN_FILE, sealed(b'{"id":"abcd"}'))
    return made


def flat(records: list[list[r.Record]]) -> list[r.Record]:
    return [record for part in records for record in part]


def write(store: PosixStore, epoch: int, records: list[r.Record], fold_after: int | None, prior: Summary) -> None:
    """Let a controller write these records, and the fold after so many of them."""
    journal = Journal(store, epoch, LEASES[epoch])
    writer = FoldWriter(store, epoch, LEASES[epoch], "abcd", deepcopy(prior))
    for n, record in enumerate(records, start=1):
        journal.append([record], "abcd")
        writer.record(record)
        if n == fold_after:
            journal.flush()
            writer.ask()
            writer.flush()
    journal.flush()
    journal.close()


@pytest.mark.parametrize("seed", range(25))
def test_a_fold_anywhere_and_the_tail_give_what_the_whole_journal_gives(store: PosixStore, seed: int) -> None:
    records = history(seed)
    whole = summarize(flat(records))
    before: list[r.Record] = []
    for epoch, part in enumerate(records, start=1):
        at = 1 + (seed * 7 + epoch * 13) % len(part)
        write(store, epoch, part, at, summarize(before))
        before += part
    found = read_history(store)
    assert found.summary == whole
    assert found.damage == []
    assert len(found.summary.curve) == len(effective_reports(flat(records)))
    assert found.summary.account == whole.account


@pytest.mark.parametrize("seed", range(20))
def test_the_summary_agrees_with_the_reports_that_count(seed: int) -> None:
    records = flat(history(seed, controllers=4, reports=60))
    for end in range(1, len(records) + 1, 7):
        reports = effective_reports(records[:end])
        last = summarize(records[:end]).curve.last
        assert last.rows == len(reports)
        assert last.iteration == (reports[-1].iteration if reports else 0)
        assert last.metrics == (reports[-1].metrics if reports else None)


def test_a_summary_does_not_grow_with_the_number_of_reports() -> None:
    """Neither with that of checkpoints, where old ones are deleted."""
    sizes = []
    for count in (100, 5000):
        records: list[r.Record] = [
            r.GenerationStarted(at=0.0, generation=1, world_size=1, agents=("a",), iteration=0),
            r.GenerationRunning(at=0.0, generation=1),
        ]
        for n in range(1, count + 1):
            at = float(n)
            records.append(r.Reported(at=at, generation=1, iteration=n, metrics={"loss": 1.0}, checkpoint=n % 2 == 0))
            if n % 2 == 0:
                name = f"checkpoint_{n:06d}"
                records.append(
                    r.CheckpointCommitted(at=at, name=name, index=n, iteration=n, generation=1, metrics={"loss": 1.0})
                )
                if n > 4:
                    records.append(r.CheckpointDeleted(at=at, name=f"checkpoint_{n - 4:06d}"))
        sizes.append(len(encode_sealed(summarize(records))))
    assert sizes[1] < sizes[0] + 200


def prepared(store: PosixStore) -> tuple[Summary, list[r.Record]]:
    (records,) = history(5, controllers=1)
    write(store, 1, records, len(records) // 2, Summary())
    return summarize(records), records


def test_only_the_tail_is_read(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, records = prepared(store)
    applied: list[r.Record] = []
    apply = Summary.apply

    def counted(self: Summary, record: r.Record) -> object:
        applied.append(record)
        return apply(self, record)

    monkeypatch.setattr(Summary, "apply", counted)
    assert read_history(store).summary == whole
    assert applied == records[len(records) // 2 :]


@pytest.mark.parametrize("harm", ["torn", "altered", "empty", "foreign run", "foreign lease", "another record", "json"])
def test_a_wrong_fold_is_not_used(store: PosixStore, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    whole, _ = prepared(store)
    data = store.get(KEY)
    fold = decode_sealed(data, Fold)
    assert fold is not None
    lying = deepcopy(fold.summary)
    lying.durable.iteration = 999
    match harm:
        case "torn":
            data = data[:-30]
        case "altered":
            data = data.replace(b'"iteration":', b'"iteratiom":', 1)
        case "empty":
            data = b""
        case "foreign run":
            data = encode_sealed(Fold(run="other", mark=fold.mark, summary=lying))
        case "foreign lease":
            mark = type(fold.mark)(1, LEASES[2], fold.mark.n, fold.mark.crc)
            data = encode_sealed(Fold(run="abcd", mark=mark, summary=lying))
        case "another record":
            mark = type(fold.mark)(1, LEASES[1], fold.mark.n, fold.mark.crc ^ 1)
            data = encode_sealed(Fold(run="abcd", mark=mark, summary=lying))
        case "json":
            data = b'{"format":"holdfast.fold/1.0"}\n'
    store.put(KEY, data)
    with caplog.at_level(logging.WARNING):
        assert read_history(store).summary == whole
    assert "is not used, and the journal is read instead" in caplog.text


def test_a_flipped_bit_in_a_fold_changes_nothing(store: PosixStore, caplog: pytest.LogCaptureFixture) -> None:
    whole, _ = prepared(store)
    data = store.get(KEY)
    caplog.set_level(logging.CRITICAL)
    path = store._root / KEY
    for bit in range(0, len(data) * 8, max(1, len(data) * 8 // 200)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert read_history(store).summary == whole


def test_a_fold_beyond_the_end_set_by_a_successor_is_not_used(store: PosixStore) -> None:
    prepared(store)
    fold = decode_sealed(store.get(KEY), Fold)
    assert fold is not None
    segment = next(entry.key for entry in store.list("journal") if entry.key.endswith(".jsonl"))
    cut = Position(segment, 0, fold.mark.n - 1)
    assert read_fold(store, JournalReader(store, [(2, cut)], "abcd"), "abcd") is None


def test_a_fold_replaces_lost_records(store: PosixStore, caplog: pytest.LogCaptureFixture) -> None:
    (records,) = history(5, controllers=1)
    write(store, 1, records, len(records), Summary())
    for entry in store.list("journal"):
        if entry.key.endswith(".jsonl"):
            store.delete([entry.key])
    assert read_history(store).summary == summarize(records)
    assert "has lost record" in caplog.text


def test_folds_are_written_at_commits_and_smaller_in_sum_than_the_journal(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAST_BYTES", 2000)
    puts: list[int] = []
    put = PosixStore.put

    def counted(self: PosixStore, key: str, data: bytes) -> None:
        puts.append(len(data))
        put(self, key, data)

    monkeypatch.setattr(PosixStore, "put", counted)
    writer = FoldWriter(store, 1, LEASES[1], "abcd", Summary())
    for n in range(1, 400):
        writer.record(r.Reported(at=float(n), generation=1, iteration=n, metrics={}, checkpoint=True))
        writer.flush()
        writer.record(
            r.CheckpointCommitted(at=float(n), name=f"c{n}", index=n, iteration=n, generation=1, metrics={"a": 1})
        )
        writer.flush()
    assert len(puts) > 3
    assert sum(puts) < 2 * 2 * 400 * 200


def test_all_but_two_folds_are_removed(store: PosixStore) -> None:
    records = history(3)
    before: list[r.Record] = []
    for epoch, part in enumerate(records, start=1):
        write(store, epoch, part, len(part), summarize(before))
        before += part
    folds = [entry.key for entry in store.list("journal") if entry.key.endswith(".fold.json")]
    assert folds == [f"journal/00000{epoch}-{LEASES[epoch]}.fold.json" for epoch in (2, 3)]


class BlockStore(PosixStore):
    """Notes how much of each file is read at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes: list[int] = []

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.read_bytes.append(length)
        return super().get_range(key, start, length)

    def get(self, key: str) -> bytes:
        assert not key.endswith(".jsonl"), f"{key} is read whole"
        return super().get(key)


@pytest.mark.parametrize("block_bytes", [1, 7, 1000, 256 * 1024])
def test_segments_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Records are the same wherever a block ends; memory does not grow with the segment."""
    monkeypatch.setattr(reader, "_BLOCK_BYTES", block_bytes)
    store = BlockStore(tmp_path / "run")
    (records,) = history(3, controllers=1, reports=10)
    journal = Journal(store, 1, LEASES[1])
    journal.append(records, "abcd")
    journal.flush()
    found = [line.record for _, line in reader.JournalReader(store, run="abcd").read()]
    journal.close()
    assert found == records
    assert set(store.read_bytes) == {block_bytes}


@pytest.mark.parametrize("damaged", [False, True])
def test_only_the_end_of_a_segment_is_read_for_the_newest_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 2000)
    store = BlockStore(tmp_path / "run")
    (records,) = history(3, controllers=1, reports=600)
    journal = Journal(store, 1, LEASES[1])
    journal.append(records, "abcd")
    journal.flush()
    (path,) = (tmp_path / "run" / "journal").iterdir()
    size_bytes = path.stat().st_size
    if damaged:  # a number that is wrong must not lead astray
        data = path.read_bytes()
        path.write_bytes(data.replace(b'{"n":%d,' % (len(records) // 2), b'{"n":%d,' % 1))
    for after in range(len(records) // 2, len(records), 23):
        mark = reader.Mark(1, LEASES[1], after)
        found = [line.record for _, line in reader.JournalReader(store, run="abcd").read(mark)]
        assert found == records[after:]
    store.read_bytes.clear()
    assert reader.JournalReader(store, run="abcd").find(reader.Mark(1, LEASES[1], len(records))) is not None
    assert sum(store.read_bytes) < size_bytes / 2
    journal.close()


def test_a_fold_that_was_asked_for_is_written_when_storage_works_again(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else has what the journal has lost."""
    writer = FoldWriter(store, 1, LEASES[1], "abcd", Summary())
    writer.record(r.RunRestarted(at=0.0, first_index=0))
    writer.ask()
    with monkeypatch.context() as broken:
        broken.setattr(PosixStore, "put", _fail)
        writer.flush()
    assert writer.next_flush_s is not None
    writer.flush()
    assert store.get(KEY)
    assert writer.next_flush_s is None


def _fail(*arguments: object) -> None:
    raise Unavailable("not now")

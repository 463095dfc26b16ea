"""The journal gives back what was written, whole lines only, and nothing that a fenced controller added."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from holdfast.control import journal as module
from holdfast.control.journal import Journal, Position, position, read_records
from holdfast.core.records import Record, Reported, RunFinished
from holdfast.errors import StorageError
from holdfast.storage.posix import PosixStore


class Remote(PosixStore):
    """A store whose keys are no files to its users, as in a bucket."""

    @property
    def local_root(self) -> Path | None:
        return None


@pytest.fixture(params=[PosixStore, Remote])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> PosixStore:
    made: PosixStore = request.param(tmp_path / "run")
    return made


def report(iteration: int, loss: float = 0.5) -> Record:
    return Reported(at=float(iteration), generation=1, iteration=iteration, metrics={"loss": loss})


def write(store: PosixStore, epoch: int, records: list[Record]) -> None:
    journal = Journal(store, epoch)
    for record in records:
        journal.append([record])
        journal.flush()
    journal.close()


def test_records_come_back_in_order(store: PosixStore) -> None:
    records = [report(n) for n in range(1, 20)]
    write(store, 1, records[:10])
    write(store, 2, records[10:])
    assert read_records(store) == records


def test_segments_are_sealed_when_large(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 200)
    monkeypatch.setattr(module, "_FILE_SEGMENT_BYTES", 200)
    records = [report(n) for n in range(1, 30)]
    write(store, 1, records)
    assert len(store.list("journal")) > 5
    assert read_records(store) == records


def test_floats_that_json_lacks_survive(store: PosixStore) -> None:
    write(store, 1, [report(1, math.nan), report(2, -math.inf), RunFinished(at=3.0, return_value=[math.inf])])
    first, second, third = read_records(store)
    assert isinstance(first, Reported) and math.isnan(first.metrics["loss"])
    assert isinstance(second, Reported) and second.metrics["loss"] == -math.inf
    assert isinstance(third, RunFinished) and third.return_value == [math.inf]


def test_a_torn_last_line_is_dropped(store: PosixStore) -> None:
    write(store, 1, [report(1), report(2)])
    key = store.list("journal")[0].key
    whole = store.get(key)
    for cut in range(1, 40):
        store.put(key, whole[:-cut])
        assert read_records(store) == [report(1)]


def test_a_damaged_line_is_left_out_loudly(store: PosixStore, caplog: pytest.LogCaptureFixture) -> None:
    write(store, 1, [report(1), report(2)])
    key = store.list("journal")[0].key
    store.put(key, b'{"kind":"Nonsense"}\n' + store.get(key))
    assert read_records(store) == [report(1), report(2)]
    assert "line 1 is damaged" in caplog.text


def test_what_a_fenced_controller_adds_does_not_count(store: PosixStore) -> None:
    old = Journal(store, 1)
    old.append([report(1)])
    old.flush()
    end = position(store)
    old.append([report(2)])
    old.flush()
    old.close()
    write(store, 2, [report(7)])
    assert read_records(store, [(2, end)]) == [report(1), report(7)]
    assert read_records(store, [(2, Position())]) == [report(7)]


def test_a_failed_flush_is_tried_again_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PosixStore(tmp_path / "run")
    journal = Journal(store, 1)
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

"""Verifying a run, repairing only what dead writers left, deleting in the right order."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit, commit_directory, reserve, upload_part
from holdfast.checkpoint.epochs import epoch_key, floor_key
from holdfast.checkpoint.removal import is_pinned, pin, remove, unpin
from holdfast.checkpoint.reservation import Reservation, read_reservation
from holdfast.checkpoint.verify import repair, verify
from holdfast.core.checkpoint_types import Draft
from holdfast.errors import CheckpointError, Fenced, NotCommitted
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Store


@pytest.fixture(params=[PosixStore, FarStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made: Store = request.param(tmp_path / "run")
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", model="weights", layers__0="zero")


def fence(store: Store, floor: int) -> None:
    """Create the epoch of a first controller."""
    store.put(epoch_key(1), json.dumps({"epoch": 1}).encode())
    store.put(floor_key(1), json.dumps({"epoch": 1, "floor": floor}).encode())


def unfinished(store: Store, source: Path, **changes: object) -> Draft:
    """A draft with files, whose writer is on another machine unless `changes` say otherwise."""
    draft = reserve(store)
    upload_part(store, draft, source, rank=0, parent_files=None)
    found = read_reservation(store, draft.name)
    assert found is not None
    far = msgspec.structs.replace(found.writer, host="elsewhere")
    rewrite(store, draft.name, msgspec.structs.replace(found, **{"writer": far, **changes}))
    return draft


def rewrite(store: Store, name: str, reservation: Reservation) -> None:
    store.put(f"{name}/.reserved.json", msgspec.json.encode(reservation))


def test_verify_lists_intact_damaged_and_unfinished_checkpoints(store: Store, source: Path, tmp_path: Path) -> None:
    ok, bad = commit_directory(store, source), commit_directory(store, source)
    (tmp_path / "run" / bad.name / "layers" / "0").unlink()
    (tmp_path / "run" / bad.name / "layers" / "0").write_text("ZERO")
    draft = unfinished(store, source)
    store.put("mine/notes.txt", b"")
    seen: list[int] = []
    report = verify(store, on_bytes=seen.append)
    assert report.ok == [ok]
    assert list(report.damaged) == [bad.name] and "layers/0 holds other bytes" in report.damaged[bad.name][0]
    assert [found.name for found in report.leftovers] == [draft.name]
    assert not report.intact
    assert sum(seen) == ok.size_bytes + bad.size_bytes
    assert verify(store, deep=False).intact
    assert verify(store, [ok.name]).ok == [ok]
    with pytest.raises(NotCommitted, match="'mine'"):
        verify(store, ["mine"])


def test_repair_keeps_live_drafts_and_damaged_checkpoints(store: Store, source: Path, tmp_path: Path) -> None:
    bad = commit_directory(store, source)
    (tmp_path / "run" / bad.name / "model").unlink()
    mine, far = reserve(store), unfinished(store, source)
    store.put("mine/notes.txt", b"")
    before = store.list()
    assert repair(store, verify(store)) == []
    assert store.list() == before
    assert {found.name for found in Catalog(store).leftovers()} == {mine.name, far.name}


def test_repair_removes_drafts_of_dead_writers_at_once(store: Store, source: Path) -> None:
    draft = reserve(store)
    upload_part(store, draft, source, rank=0, parent_files=None)
    found = read_reservation(store, draft.name)
    assert found is not None
    gone = msgspec.structs.replace(found.writer, started_ticks=1)
    rewrite(store, draft.name, msgspec.structs.replace(found, writer=gone))
    assert repair(store, verify(store)) == [draft.name]
    assert store.list() == []


def test_repair_writes_a_tombstone_before_it_deletes(store: Store, source: Path) -> None:
    draft = unfinished(store, source, created_at="2020-01-01T00:00:00.000Z")
    assert repair(store, verify(store)) == [draft.name]
    assert [entry.key.rpartition("/")[2] for entry in store.list()] == [".manifest.json", ".reserved.json"]
    with pytest.raises(Fenced):
        commit(store, draft, [])
    assert repair(store, verify(store)) == []
    assert repair(store, verify(store), older_than_s=0) == [draft.name]
    assert store.list() == []


def test_repair_removes_drafts_of_a_fenced_controller(store: Store, source: Path) -> None:
    draft = unfinished(store, source)
    fence(store, 100)
    assert repair(store, verify(store)) == [draft.name]
    assert Catalog(store).leftovers() == []


def test_repair_keeps_what_was_committed_meanwhile(store: Store, source: Path) -> None:
    draft = reserve(store)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    report = verify(store)
    commit(store, draft, files)
    assert repair(store, report, older_than_s=0) == []
    assert verify(store, deep=True).intact


def test_repair_removes_fenced_commits_when_they_are_old(store: Store, source: Path) -> None:
    done = commit_directory(store, source)
    fence(store, 0)
    assert repair(store, verify(store)) == []
    assert repair(store, verify(store), older_than_s=0) == [done.name]


def test_repair_removes_temporary_files_when_they_are_old(source: Path, tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    done = commit_directory(store, source)
    temporary = tmp_path / "run" / done.name / ".tmp-1-0123456789abcdef"
    temporary.write_text("half")
    assert repair(store, verify(store)) == []
    os.utime(temporary, (0, 0))
    assert repair(store, verify(store)) == [f"{done.name}/{temporary.name}"]
    assert verify(store).ok == [done]


def test_a_pinned_checkpoint_is_removed_only_after_unpin(store: Store, source: Path) -> None:
    first, second = commit_directory(store, source), commit_directory(store, source)
    pin(store, first.name)
    assert is_pinned(store, first.name) and not is_pinned(store, second.name)
    with pytest.raises(CheckpointError, match="pinned"):
        remove(store, first.name)
    unpin(store, first.name)
    unpin(store, first.name)
    remove(store, first.name)
    assert Catalog(store).committed() == [second]
    assert store.children() == [second.name]
    with pytest.raises(NotCommitted):
        remove(store, first.name)
    with pytest.raises(NotCommitted):
        pin(store, first.name)
    with pytest.raises(NotCommitted, match="repair"):
        remove(store, reserve(store).name)


def test_a_damaged_checkpoint_may_be_removed(store: Store, source: Path) -> None:
    done = commit_directory(store, source)
    key = f"{done.name}/.manifest.json"
    store.put(key, store.get(key).replace(b"0", b"1"))
    remove(store, done.name)
    assert store.list() == []

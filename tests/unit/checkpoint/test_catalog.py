"""Which checkpoints are committed, void or damaged, and which drafts a new controller voids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from blake3 import blake3
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit, commit_directory, reserve, upload_part
from holdfast.checkpoint.epochs import epoch_key, floor_key
from holdfast.checkpoint.restore import fetch, newest_intact
from holdfast.errors import Damaged, Fenced, NotCommitted, UnsupportedFormat


@pytest.fixture
def store(tmp_path: Path) -> FarStore:
    return FarStore(tmp_path / "run")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", model="weights", layers__0="zero")


def epoch_file(store: FarStore, epoch: int, floor: int | None) -> None:
    store.put(epoch_key(epoch), json.dumps({"epoch": epoch, "host": "x"}).encode())
    if floor is not None:
        store.put(floor_key(epoch), json.dumps({"epoch": epoch, "floor": floor}).encode())


def names(store: FarStore) -> list[str]:
    return [found.name for found in Catalog(store).committed()]


def test_checkpoints_are_ordered_by_index_then_name(store: FarStore, source: Path) -> None:
    for name in (None, "zz", None, "aa"):
        commit_directory(store, source, name=name)
    assert names(store) == ["checkpoint_000000", "zz", "checkpoint_000002", "aa"]
    assert [found.name for found in Catalog(store).newest_first()] == names(store)[::-1]
    newest = Catalog(store).newest()
    assert newest is not None and newest.name == "aa"


def test_an_empty_run_has_no_checkpoints(store: FarStore) -> None:
    catalog = Catalog(store)
    assert (catalog.committed(), catalog.leftovers(), catalog.newest(), catalog.floors()) == ([], [], None, {})
    with pytest.raises(NotCommitted, match="'best'"):
        catalog.get("best")


def test_other_directories_are_no_checkpoints(store: FarStore, source: Path) -> None:
    store.put("notes/a.txt", b"")
    store.put("journal/x.jsonl", b"")
    store.put(".hidden/.manifest.json", b"")
    commit_directory(store, source)
    assert names(store) == ["checkpoint_000000"]
    assert Catalog(store).leftovers() == []


def test_a_later_epochs_floor_voids_commits_above_it(store: FarStore, source: Path) -> None:
    commit_directory(store, source)
    epoch_file(store, 1, 0)
    assert names(store) == []
    assert [found.name for found in Catalog(store).void()] == ["checkpoint_000000"]
    mine = commit_directory(store, source)
    assert (mine.epoch, mine.index) == (1, 1)
    epoch_file(store, 2, 2)
    assert names(store) == [mine.name]
    epoch_file(store, 3, None)
    assert names(store) == [mine.name]
    assert Catalog(store).floors() == {1: 0, 2: 2, 3: None}
    with pytest.raises(NotCommitted):
        fetch(store, "checkpoint_000000", source.parent / "out")


def test_a_voided_name_may_be_used_again(store: FarStore, source: Path) -> None:
    commit_directory(store, source, name="best")
    epoch_file(store, 1, 0)
    again = commit_directory(store, source, name="best")
    assert again.epoch == 1
    assert names(store) == ["best"]


@pytest.mark.parametrize("floor", [None, 0])
def test_a_fenced_writer_gets_an_error(store: FarStore, source: Path, floor: int | None) -> None:
    draft = reserve(store, epoch=0)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    epoch_file(store, 1, floor)
    with pytest.raises(Fenced, match="took the run over"):
        commit(store, draft, files)


def test_a_commit_below_the_floor_counts(store: FarStore, source: Path) -> None:
    draft = reserve(store, epoch=0)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    epoch_file(store, 1, 1)
    assert commit(store, draft, files).name == draft.name
    assert Catalog(store).void_drafts(1, 1) == []
    assert names(store) == [draft.name]


def test_void_drafts_writes_tombstones_for_unfinished_drafts(store: FarStore, source: Path) -> None:
    kept = commit_directory(store, source)
    old, custom = reserve(store, epoch=0), reserve(store, epoch=0, name="best")
    files = upload_part(store, old, source, rank=0, parent_files=None)
    own, above = reserve(store, epoch=1, at_least=10), reserve(store, epoch=0, at_least=50)
    assert sorted(Catalog(store).void_drafts(1, floor=20)) == ["best", old.name]
    assert [entry.key for entry in store.list(old.name)] == [f"{old.name}/.manifest.json", f"{old.name}/.reserved.json"]
    with pytest.raises(Fenced, match="shut"):
        commit(store, old, files)
    assert {found.name for found in Catalog(store).leftovers()} == {above.name, own.name}
    assert names(store) == [kept.name]
    assert reserve(store, epoch=1).index == 51
    assert reserve(store, epoch=1, name="best").index == 52
    assert custom.index == 2


def test_without_exclusive_creation_files_of_voided_drafts_stay(tmp_path: Path, source: Path) -> None:
    store = FarStore(tmp_path / "run", exclusive=False)
    draft = reserve(store)
    upload_part(store, draft, source, rank=0, parent_files=None)
    assert Catalog(store).void_drafts(1, 5) == [draft.name]
    assert f"{draft.name}/model" in [entry.key for entry in store.list()]
    assert names(store) == []


def test_altered_manifests_are_reported_and_skipped(store: FarStore, source: Path) -> None:
    first, second = commit_directory(store, source), commit_directory(store, source)
    key = f"{second.name}/.manifest.json"
    store.put(key, store.get(key).replace(b'"index":1', b'"index":7'))
    catalog = Catalog(store)
    assert catalog.committed() == [first]
    [(name, problem)] = catalog.damaged()
    assert name == second.name and "seal" in problem
    with pytest.raises(Damaged):
        catalog.get(second.name)
    told: list[tuple[str, str]] = []
    assert newest_intact(store, deep=False, on_damage=lambda found, why: told.append((found.name, why))) == first
    assert [name for name, _ in told] == [second.name]
    assert catalog.leftovers() == []


def test_a_torn_manifest_is_a_leftover(store: FarStore, source: Path) -> None:
    first, second = commit_directory(store, source), commit_directory(store, source)
    key = f"{second.name}/.manifest.json"
    for data in (b"", store.get(key)[:-1]):
        store.put(key, data)
        assert names(store) == [first.name]
        assert [found.name for found in Catalog(store).leftovers()] == [second.name]
        assert Catalog(store).damaged() == []


def test_a_newer_major_format_is_refused(store: FarStore, source: Path) -> None:
    body = b'{"format":"holdfast.checkpoint/2.0"}'
    seal = b',"self":"' + blake3(body).hexdigest().encode() + b'"}\n'
    store.put("checkpoint_000000/.manifest.json", body[:-1] + seal)
    with pytest.raises(UnsupportedFormat, match="upgrade"):
        Catalog(store).committed()


def test_a_copied_checkpoint_directory_is_not_listed(store: FarStore, source: Path, tmp_path: Path) -> None:
    first = commit_directory(store, source)
    shutil.copytree(tmp_path / "run" / first.name, tmp_path / "run" / "keep")
    assert names(store) == [first.name]
    assert Catalog(store).leftovers() == []
    shutil.copytree(tmp_path / "run", tmp_path / "moved")
    assert names(FarStore(tmp_path / "moved")) == [first.name]


def test_a_damaged_epoch_file_is_an_error(store: FarStore, source: Path) -> None:
    commit_directory(store, source)
    epoch_file(store, 1, None)
    store.put(floor_key(1), b'{"epoch":}')
    with pytest.raises(Damaged, match=r"epochs/000001\.floor\.json"):
        Catalog(store).committed()


def test_an_epoch_without_a_floor_voids_nothing(store: FarStore, source: Path) -> None:
    done = commit_directory(store, source)
    store.put("epochs/readme.txt", b"ignored")
    store.put(epoch_key(1), b'{"epo')
    store.put(floor_key(1), b'{"epoch": 1, "flo')
    assert Catalog(store).committed() == [done]
    assert Catalog(store).floors() == {1: None}

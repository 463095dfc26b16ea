"""Whoever deletes what a writer left may be paused anywhere, and find that the name is another's: a custom one is used
again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.unit.checkpoint.far_store import FarStore, write_source
from tests.unit.checkpoint.test_removal import PausedStore

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import abandon, commit, reserve, upload_part
from holdfast.checkpoint.epochs import epoch_key, floor_key
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.part_records import write_part_record
from holdfast.checkpoint.reservation import read_reservation, write_tombstone
from holdfast.checkpoint.verify import repair, verify
from holdfast.core.checkpoint_types import CheckpointInfo, Draft, FileEntry
from holdfast.errors import HoldfastError
from holdfast.storage.store import Store

NAME = "best"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", model="weights", layers__0="zero")


def begin(store: Store, epoch: int) -> int:
    """A controller takes the run over; gives its floor."""
    store.put(epoch_key(epoch), json.dumps({"epoch": epoch}).encode())
    floor = Catalog(store).survey().next_index()
    store.put(floor_key(epoch), json.dumps({"epoch": epoch, "floor": floor}).encode())
    return floor


def unfinished(store: Store, source: Path, epoch: int, *, dead: bool = False, name: str | None = NAME) -> Draft:
    """What a writer has left, which was on another machine, or (`dead`) on this one."""
    draft = reserve(store, name=name, epoch=epoch)
    upload_part(store, draft, source, rank=0, parent_files=None)
    found = read_reservation(store, draft.name)
    assert found is not None
    writer = msgspec.structs.replace(found.writer, **({"started_ticks": 1} if dead else {"host": "elsewhere"}))
    changed = msgspec.structs.replace(found, writer=writer, created_at="2020-01-01T00:00:00.000Z")
    store.put(f"{draft.name}/.reserved.json", msgspec.json.encode(changed))
    return draft


Operation = Callable[[Store], object]


def repair_a_dead_writers_draft(store: Store, source: Path) -> tuple[Operation, int]:
    begin(store, 1)
    unfinished(store, source, 1, dead=True)
    report = verify(store)
    return lambda paused: repair(paused, report), 2


def repair_a_dead_writers_draft_of_a_driver_that_runs_again(store: Store, source: Path) -> tuple[Operation, int]:
    """The driver that uses the name again has begun before."""
    begin(store, 1)
    unfinished(store, source, 1, dead=True)
    begin(store, 2)
    report = verify(store)
    return lambda paused: repair(paused, report), 2


def repair_a_fenced_writers_draft(store: Store, source: Path) -> tuple[Operation, int]:
    begin(store, 1)
    unfinished(store, source, 1)
    begin(store, 2)
    report = verify(store)
    return lambda paused: repair(paused, report), 2


def repair_a_tombstone(store: Store, source: Path) -> tuple[Operation, int]:
    begin(store, 1)
    draft = unfinished(store, source, 1)
    begin(store, 2)
    write_tombstone(store, NAME, index=draft.index, epoch=2, token=draft.token)
    report = verify(store)
    return lambda paused: repair(paused, report, older_than_s=0.0), 2


def repair_a_commit_that_came_too_late(store: Store, source: Path) -> tuple[Operation, int]:
    begin(store, 1)
    begin(store, 2)
    store.put(floor_key(2), json.dumps({"epoch": 2, "floor": 0}).encode())
    draft = Draft(name=NAME, index=0, epoch=1, token="ab" * 16, parent=None)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    at, writer = "2020-01-01T00:00:00.000Z", {"host": "elsewhere", "pid": 1}
    reserved = {"token": draft.token, "index": 0, "epoch": 1, "created_at": at, "writer": writer}
    store.put(f"{NAME}/.reserved.json", json.dumps(reserved).encode())
    with pytest.raises(HoldfastError):
        commit(store, draft, files)
    report = verify(store)
    assert [one.name for one in report.void] == [NAME]
    return lambda paused: repair(paused, report, older_than_s=0.0), 3


def void_drafts(store: Store, source: Path) -> tuple[Operation, int]:
    begin(store, 1)
    unfinished(store, source, 1)
    floor = begin(store, 2)
    return lambda paused: Catalog(paused).void_drafts(2, floor), 3


def abandon_a_draft(store: Store, source: Path) -> tuple[Operation, int]:
    begin(store, 1)
    draft = unfinished(store, source, 1)
    return lambda paused: abandon(paused, draft), 2


def take_a_name_over(store: Store, source: Path) -> tuple[Operation, int]:
    begin(store, 1)
    unfinished(store, source, 1)
    begin(store, 2)
    return lambda paused: reserve(paused, name=NAME, epoch=2), 3


@pytest.mark.parametrize("commits", [True, False], ids=["commits meanwhile", "commits afterwards"])
@pytest.mark.parametrize(
    "prepare",
    [
        repair_a_dead_writers_draft,
        repair_a_dead_writers_draft_of_a_driver_that_runs_again,
        repair_a_fenced_writers_draft,
        repair_a_tombstone,
        repair_a_commit_that_came_too_late,
        void_drafts,
        abandon_a_draft,
        take_a_name_over,
    ],
)
def test_a_paused_deletion_does_not_harm_the_next_user_of_the_name(
    prepare: Callable[[Store, Path], tuple[Operation, int]], commits: bool, source: Path, tmp_path: Path
) -> None:
    """Paused before each look; between the last look and the deletion itself nothing can be noticed."""

    def run(pause_before: int | None) -> PausedStore:
        root = tmp_path / f"run-{pause_before}"
        store = PausedStore(root)
        operation, epoch = prepare(FarStore(root), source)
        drafts: list[tuple[Draft, list[FileEntry]]] = []
        done: list[Manifest] = []

        def take_over() -> None:
            next_store = FarStore(root)
            begin(next_store, epoch)
            draft = reserve(next_store, name=NAME, epoch=epoch)
            drafts.append((draft, upload_part(next_store, draft, source, rank=0, parent_files=None)))
            if commits:
                done.append(commit(next_store, *drafts[0]))

        store.pause_before, store.action = pause_before, take_over
        try:
            operation(store)
        except HoldfastError:
            assert pause_before is not None
        if pause_before is not None and not commits:
            done.append(commit(FarStore(root), *drafts[0]))
        report = verify(FarStore(root), deep=True)
        where = None if pause_before is None else store.calls[pause_before]
        assert (report.ok, report.damaged) == (done, {}), where
        return store

    looks = [at for at, call in enumerate(run(None).calls) if not call.startswith("delete")]
    assert len(looks) > 4
    for at in looks:
        run(at)


def test_repair_does_not_delete_what_the_next_controller_commits_from_part_records(
    source: Path, tmp_path: Path
) -> None:
    """The writer has died here, and an agent on another machine finishes its upload while `repair` is paused."""

    def run(pause_before: int | None) -> PausedStore:
        root = tmp_path / f"run-{pause_before}"
        store, other = PausedStore(root), FarStore(root)
        begin(other, 1)
        draft = reserve(other, epoch=1)
        files = upload_part(other, draft, source, rank=0, parent_files=None)
        found = read_reservation(other, draft.name)
        assert found is not None
        writer = msgspec.structs.replace(found.writer, started_ticks=1)
        other.put(f"{draft.name}/.reserved.json", msgspec.json.encode(msgspec.structs.replace(found, writer=writer)))
        report = verify(other)
        committed: list[Manifest] = []

        def finish() -> None:
            info = CheckpointInfo(ranks=(0,), world_size=1, iteration=1, metrics={})
            if write_part_record(other, draft, info, 0, files, generation=1):
                Catalog(other).void_drafts(2, begin(other, 2))
                committed.extend(Catalog(other).committed())

        store.pause_before, store.action = pause_before, finish
        repair(store, report)
        found_now = verify(other, deep=True)
        where = None if pause_before is None else store.calls[pause_before]
        assert (found_now.ok, found_now.damaged) == (committed, {}), where
        return store

    looks = [at for at, call in enumerate(run(None).calls) if not call.startswith("delete")]
    for at in looks:
        run(at)

"""A draft whose controller died is committed from the part records of all its ranks, or voided if anything is
missing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint import layout
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit, commit_directory, reserve, upload_part
from holdfast.checkpoint.epochs import epoch_key, floor_key
from holdfast.checkpoint.manifest import sealed
from holdfast.checkpoint.part_records import PartRecord, is_open, write_part_record
from holdfast.checkpoint.reservation import read_reservation, write_tombstone
from holdfast.checkpoint.upload_locks import UploadLock, is_uploading
from holdfast.checkpoint.verify import repair, verify
from holdfast.core.checkpoint_types import CheckpointInfo, Draft
from holdfast.errors import ConfigError, Fenced
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Store

INFO = CheckpointInfo(ranks=(0, 2), world_size=4, iteration=7, metrics={"loss": math.nan, "step": 6})


@pytest.fixture(params=["files", "objects", "objects that cannot be created exclusively"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "files":
        return PosixStore(tmp_path / "run")
    return FarStore(tmp_path / "run", exclusive=request.param == "objects")


@pytest.fixture
def draft(store: Store, tmp_path: Path) -> Draft:
    """A draft of epoch 1 with the files of ranks 0 and 2 and their records; epoch 2 has settled its floor above it."""
    store.put(epoch_key(1), json.dumps({"epoch": 1}).encode())
    store.put(floor_key(1), json.dumps({"epoch": 1, "floor": 0}).encode())
    made = reserve(store)
    for rank in (0, 2):
        add_part(store, made, tmp_path, rank)
    store.put(epoch_key(2), json.dumps({"epoch": 2}).encode())
    store.put(floor_key(2), json.dumps({"epoch": 2, "floor": 1}).encode())
    return made


def add_part(store: Store, draft: Draft, tmp_path: Path, rank: int) -> None:
    source = write_source(tmp_path / f"rank_{rank}", **{f"part_{rank}": f"weights of {rank}"})
    files = upload_part(store, draft, source, rank=rank, parent_files=None)
    assert write_part_record(store, draft, INFO, rank, files, generation=3)


def record_key(draft: Draft, rank: int) -> str:
    return layout.key_of(draft.name, layout.part_name(rank))


def change(store: Store, draft: Draft, **fields: object) -> None:
    """Write the record of rank 2 anew with other fields."""
    found = msgspec.json.decode(store.get(record_key(draft, 2)), type=PartRecord)
    changed = msgspec.structs.replace(found, **fields)
    store.put(record_key(draft, 2), sealed(msgspec.json.encode(changed)))


def dead_pid_writer() -> dict[str, object]:
    """The identity of a process of this machine that has ended."""
    code = (
        "import msgspec\nfrom holdfast.checkpoint.process_identity import this_process\n"
        "print(msgspec.json.encode(this_process()).decode())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    found: dict[str, object] = json.loads(printed)
    return found


def sign_by_the_dead(store: Store, draft: Draft) -> None:
    key = layout.key_of(draft.name, layout.RESERVED)
    store.put(key, json.dumps({**json.loads(store.get(key)), "writer": dead_pid_writer()}).encode())


def test_the_next_controller_commits_a_complete_draft(store: Store, draft: Draft) -> None:
    assert Catalog(store).void_drafts(2, 1) == []
    (found,) = Catalog(store).committed()
    assert (found.name, found.index, found.epoch, found.token) == (draft.name, 0, 1, draft.token)
    assert (found.world_size, found.generation, found.iteration) == (4, 3, 7)
    assert found.metrics["step"] == 6 and math.isnan(found.metrics["loss"])
    assert [(entry.path, entry.rank) for entry in found.files] == [("part_0", 0), ("part_2", 2)]
    assert verify(store, deep=True).intact
    names = {entry.key.removeprefix(f"{draft.name}/") for entry in store.list(draft.name)}
    assert names == {".manifest.json", ".reserved.json", "part_0", "part_2"}


def test_a_controller_fenced_before_it_wrote_its_floor_does_not_void_a_recorded_draft(
    store: Store, draft: Draft
) -> None:
    store.put(floor_key(2), json.dumps({"epoch": 2, "floor": None}).encode())
    store.put(epoch_key(3), json.dumps({"epoch": 3}).encode())
    store.put(floor_key(3), json.dumps({"epoch": 3, "floor": 1}).encode())
    Catalog(store).void_drafts(3, 1)
    assert [found.name for found in Catalog(store).committed()] == [draft.name]


def _remove_record(store: Store, draft: Draft) -> None:
    store.delete([record_key(draft, 0)])


def _tear_record(store: Store, draft: Draft) -> None:
    store.put(record_key(draft, 0), store.get(record_key(draft, 0))[:-9])


def _alter_record(store: Store, draft: Draft) -> None:
    store.put(record_key(draft, 0), store.get(record_key(draft, 0)).replace(b'"iteration":7', b'"iteration":8'))


def _remove_file(store: Store, draft: Draft) -> None:
    store.delete([f"{draft.name}/part_2"])


def _shorten_file(store: Store, draft: Draft) -> None:
    store.put(f"{draft.name}/part_2", b"")


@pytest.mark.parametrize(
    "spoil",
    [
        _remove_record,
        _tear_record,
        _alter_record,
        _remove_file,
        _shorten_file,
        lambda store, draft: change(store, draft, token="0" * 32),
        lambda store, draft: change(store, draft, ranks=(0, 1, 2)),
        lambda store, draft: change(store, draft, iteration=8),
        lambda store, draft: change(store, draft, format="holdfast.part/2.0"),
        lambda store, draft: change(
            store, draft, files=({"path": "../part_2", "size_bytes": 12, "blake3": "0" * 64, "rank": 2},)
        ),
        lambda store, draft: change(
            store, draft, files=({"path": "part_0", "size_bytes": 12, "blake3": "0" * 64, "rank": 2},)
        ),
    ],
    ids=[
        "a record is missing",
        "a record is torn",
        "a record is altered",
        "a file is missing",
        "a file is short",
        "a record of another draft",
        "a rank is missing",
        "records disagree",
        "a newer format",
        "a path outside",
        "one path from two ranks",
    ],
)
def test_incomplete_drafts_are_voided(store: Store, draft: Draft, spoil: Callable[[Store, Draft], None]) -> None:
    spoil(store, draft)
    assert Catalog(store).void_drafts(2, 1) == [draft.name]
    assert Catalog(store).committed() == []
    (void,) = Catalog(store).void()
    assert void.name == draft.name
    if store.exclusive:
        names = {entry.key.removeprefix(f"{draft.name}/") for entry in store.list(draft.name)}
        assert names == {".manifest.json", ".reserved.json"}


def test_no_part_record_is_written_to_a_voided_or_foreign_draft(store: Store, draft: Draft) -> None:
    assert is_open(store, draft)
    other = msgspec.structs.replace(draft, token="0" * 32)
    assert not write_part_record(store, other, INFO, 1, (), generation=3)
    assert write_tombstone(store, draft.name, index=0, epoch=2, token=draft.token)
    assert not is_open(store, draft)
    assert not write_part_record(store, draft, INFO, 1, (), generation=3)
    assert record_key(draft, 1) not in {entry.key for entry in store.list(draft.name)}


def test_the_old_controller_cannot_commit_after_the_next_one_did(store: Store, draft: Draft) -> None:
    Catalog(store).void_drafts(2, 1)
    with pytest.raises(Fenced):
        commit(store, msgspec.structs.replace(draft, token="0" * 32), ())
    assert [found.iteration for found in Catalog(store).committed()] == [7]


def test_repair_keeps_drafts_that_the_next_controller_can_commit(store: Store, draft: Draft) -> None:
    sign_by_the_dead(store, draft)
    assert repair(store, verify(store)) == []
    Catalog(store).void_drafts(2, 1)
    assert [found.name for found in Catalog(store).committed()] == [draft.name]


def test_repair_keeps_a_draft_whose_upload_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    store = PosixStore(tmp_path / "run")
    made = reserve(store)
    sign_by_the_dead(store, made)
    session = tmp_path / "cache" / "agents" / "a1"
    session.mkdir(parents=True)
    lock = UploadLock(session, made.token)
    assert repair(store, verify(store)) == []
    lock.release()
    assert repair(store, verify(store)) == [made.name]


def test_an_upload_lock_ends_with_its_process(tmp_path: Path) -> None:
    session = tmp_path / "agents" / "a1"
    session.mkdir(parents=True)
    code = (
        "import sys, pathlib\nfrom holdfast.checkpoint.upload_locks import UploadLock\n"
        "lock = UploadLock(pathlib.Path(sys.argv[1]), 'abc')\nprint('held', flush=True)\nsys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(session)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert is_uploading("abc", tmp_path)
        assert not is_uploading("abd", tmp_path)
        assert not is_uploading("*", tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    assert not is_uploading("abc", tmp_path)
    assert [path.name for path in (session / "uploads").iterdir()] == ["abc"]  # goes with the agent's directory


def test_a_checkpoint_directory_with_records_in_it_can_be_committed_again(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    made = reserve(store)
    info = msgspec.structs.replace(INFO, ranks=(0,))
    files = upload_part(store, made, write_source(tmp_path / "in", model="w"), rank=0, parent_files=None)
    write_part_record(store, made, info, 0, files, generation=1)
    again = commit_directory(PosixStore(tmp_path / "other"), tmp_path / "run" / made.name)
    assert [entry.path for entry in again.files] == ["model"]
    mine = write_source(tmp_path / "mine", model="w")
    (mine / ".part-0.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"\.part-0\.json"):
        commit_directory(store, mine)
    (mine / ".part-0.json").rename(mine / ".part-x.json")
    assert {entry.path for entry in commit_directory(store, mine).files} == {"model", ".part-x.json"}
    assert read_reservation(store, made.name) is not None

"""Reserve, upload and commit: names, copies of unchanged files, refusals, lost answers, full disks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint import claims, layout
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import (
    abandon,
    commit,
    commit_directory,
    merge_parts,
    reference_existing,
    reserve,
    upload_part,
)
from holdfast.checkpoint.epochs import epoch_key, floor_key
from holdfast.checkpoint.process_identity import this_process
from holdfast.checkpoint.reservation import read_reservation, write_tombstone
from holdfast.checkpoint.restore import fetch
from holdfast.checkpoint.timestamps import now_text
from holdfast.checkpoint.upload import owned_by_others
from holdfast.checkpoint.verify import repair, verify
from holdfast.core.checkpoint_types import Draft, FileEntry
from holdfast.errors import CheckpointError, ConfigError, DuplicateFile, Fenced, NameTaken, OutOfSpace, Unavailable
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Digest, OnBytes, Source, Store


@pytest.fixture(params=[True, False], ids=["exclusive", "not exclusive"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FarStore:
    return FarStore(tmp_path / "run", exclusive=request.param)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", model="weights", layers__0="zero")


def dead(store: Store, draft: Draft) -> None:
    """Make a draft look as if its writer had died."""
    found = read_reservation(store, draft.name)
    assert found is not None
    gone = msgspec.structs.replace(found.writer, started_ticks=1)
    store.put(f"{draft.name}/.reserved.json", msgspec.json.encode(msgspec.structs.replace(found, writer=gone)))


def test_commit_directory_commits_in_one_call(store: FarStore, source: Path, tmp_path: Path) -> None:
    (source / ".metadata.json").write_text('{"by": "me"}')
    done = commit_directory(store, source, metrics={"loss": 1.5})
    assert (done.name, done.index, done.parent, done.metrics) == ("checkpoint_000000", 0, None, {"loss": 1.5})
    assert [entry.path for entry in done.files] == ["layers/0", "model"]
    assert Catalog(store).committed() == [done]
    fetched = fetch(store, done.name, tmp_path / "out")
    assert (fetched / "layers" / "0").read_text() == "zero"
    assert (fetched / ".metadata.json").read_text() == '{"by": "me"}'
    assert sorted(path.name for path in fetched.iterdir()) == [".metadata.json", "layers", "model"]
    assert not any(layout.CLAIM_PREFIX in entry.key for entry in store.list())


def test_indices_increase_over_all_names(store: FarStore, source: Path) -> None:
    assert commit_directory(store, source).index == 0
    assert commit_directory(store, source, name="best").index == 1
    assert reserve(store).index == 2
    assert reserve(store, at_least=10).name == "checkpoint_000010"
    assert reserve(store).index == 11


def test_an_empty_directory_is_a_checkpoint(store: FarStore, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    assert commit_directory(store, tmp_path / "nothing").files == ()
    assert verify(store).intact


def test_unchanged_files_are_copied(store: FarStore, source: Path) -> None:
    commit_directory(store, source)
    (source / "model").write_text("WEIGHTS")
    store.uploads.clear()
    done = commit_directory(store, source)
    assert store.uploads == ["checkpoint_000001/model"]
    assert done.parent == "checkpoint_000000"
    assert verify(store, deep=True).intact


def test_a_parent_that_is_gone_or_damaged_costs_an_upload(store: FarStore, source: Path, tmp_path: Path) -> None:
    parent = commit_directory(store, source)
    (tmp_path / "run" / parent.name / "model").write_text("we")
    store.delete([f"{parent.name}/layers/0"])
    draft = reserve(store)
    files = upload_part(store, draft, source, rank=0, parent_files=parent.files)
    commit(store, draft, files)
    assert verify(store, [draft.name], deep=True).intact


def test_several_ranks_upload_to_one_draft(store: FarStore, tmp_path: Path) -> None:
    draft = msgspec.json.decode(msgspec.json.encode(reserve(store)), type=Draft)
    parts: dict[int, list[FileEntry]] = {}
    for rank in (1, 0):
        directory = write_source(tmp_path / f"rank{rank}", **{f"shard{rank}": f"part {rank}"})
        (directory / ".metadata.json").write_text(f'{{"rank": {rank}}}')
        parts[rank] = upload_part(store, draft, directory, rank=rank, parent_files=None)
    assert Catalog(store).committed() == []
    done = commit(store, draft, merge_parts(parts), metrics={}, world_size=2, generation=3, iteration=4)
    assert [(entry.path, entry.rank) for entry in done.files] == [("shard0", 0), ("shard1", 1)]
    assert (done.world_size, done.generation, done.iteration) == (2, 3, 4)
    assert store.get(f"{done.name}/.metadata.json") == b'{"rank": 0}'
    again = [FileEntry(path="shard0", size_bytes=0, blake3="0" * 64, rank=1)]
    with pytest.raises(DuplicateFile, match=r"Ranks 0 and 1 .*'shard0'"):
        merge_parts({0: parts[0], 1: again})


def test_of_files_with_the_same_name_the_lowest_rank_keeps_its_own(store: FarStore, tmp_path: Path) -> None:
    draft = reserve(store)
    names = {0: ["same"], 2: ["same", "other", "own"], 3: ["other"]}
    texts = {0: {"same": "a"}, 2: {"same": "a", "other": "b", "own": "c"}, 3: {"other": "x"}}
    others = owned_by_others(names)
    assert others == {0: frozenset(), 2: {"same"}, 3: {"other"}}
    parts: dict[int, list[FileEntry]] = {}
    for rank in (3, 2, 0):
        directory = write_source(tmp_path / f"rank{rank}", **texts[rank])
        parts[rank] = upload_part(store, draft, directory, rank=rank, parent_files=None, hash_only=others[rank])
    done = commit(store, draft, merge_parts(parts), world_size=4)
    assert [(entry.path, entry.rank) for entry in done.files] == [("other", 2), ("own", 2), ("same", 0)]
    assert done.files[0].differing_ranks == (3,)
    assert [entry.differing_ranks for entry in done.files[1:]] == [UNSET, UNSET]
    assert all(entry.hash_only is UNSET for entry in done.files)
    assert store.get(f"{done.name}/other") == b"b"
    assert verify(store, [draft.name], deep=True).intact
    with pytest.raises(DuplicateFile, match=r"Rank 3's file 'other' was not stored, nor was a lower rank's"):
        merge_parts({3: parts[3]})


def test_a_file_and_a_directory_of_the_same_name_are_refused() -> None:
    file = FileEntry(path="a", size_bytes=0, blake3="0" * 64, rank=0)
    directory = FileEntry(path="a", size_bytes=0, blake3="0" * 64, rank=1, directory=True)
    with pytest.raises(DuplicateFile, match="Ranks 0 and 1 both stored 'a'"):
        merge_parts({0: [file], 1: [directory]})
    assert merge_parts({1: [directory], 2: [replace(directory, rank=2)]}) == (directory,)


def test_a_committed_name_is_refused(store: FarStore, source: Path) -> None:
    commit_directory(store, source, name="best")
    with pytest.raises(NameTaken, match="'best'"):
        commit_directory(store, source, name="best")
    reserve(store, name="busy")
    with pytest.raises(NameTaken, match=f"taken by .*:{os.getpid()}"):
        reserve(store, name="busy")


def test_a_directory_with_foreign_files_is_refused(store: FarStore, source: Path) -> None:
    store.put("mine/notes.txt", b"x")
    with pytest.raises(NameTaken, match="other files"):
        reserve(store, name="mine")
    draft = reserve(store, name="mine", adopt=True)
    entries = reference_existing(store, "mine")
    done = commit(store, draft, entries)
    assert [entry.path for entry in done.files] == ["notes.txt"]
    assert verify(store, deep=True).intact


def test_files_of_the_users_own_outlive_drafts_that_were_to_adopt_them(store: FarStore, source: Path) -> None:
    """The first draft is given up, and the next one's writer dies: what the user has stored since is not its files."""
    store.put("mine/model", b"first")
    draft = reserve(store, name="mine", adopt=True)
    abandon(store, draft, adopt=True)
    assert [(entry.key, store.get(entry.key)) for entry in store.list("mine")] == [("mine/model", b"first")]
    draft = reserve(store, name="mine", adopt=True)
    dead(store, draft)
    store.put("mine/model", b"second")
    draft = reserve(store, name="mine", adopt=True)
    dead(store, draft)
    write_tombstone(store, "mine", index=draft.index, epoch=0, token=draft.token)
    store.put("mine/model", b"third")
    draft = reserve(store, name="mine", adopt=True)
    done = commit(store, draft, reference_existing(store, "mine"))
    assert [entry.path for entry in done.files] == ["model"] and store.get("mine/model") == b"third"
    assert verify(store, deep=True).ok == [done]


def test_numbered_names_must_increase(store: FarStore, source: Path) -> None:
    assert commit_directory(store, source, name="checkpoint_000005").index == 5
    with pytest.raises(ConfigError, match=r"count upwards.*checkpoint_000006"):
        reserve(store, name="checkpoint_000003")
    with pytest.raises(NameTaken):
        reserve(store, name="checkpoint_000005")
    assert reserve(store).index == 6


def test_a_dead_writers_name_is_free_again(store: FarStore, source: Path) -> None:
    draft = reserve(store, name="best")
    upload_part(store, draft, write_source(source.parent / "other", stale="old"), rank=0, parent_files=None)
    dead(store, draft)
    done = commit_directory(store, source, name="best")
    assert "best/stale" not in [entry.key for entry in store.list("best")]
    assert Catalog(store).committed() == [done]


def test_a_torn_reservation_keeps_no_controller_from_a_name(store: FarStore, source: Path) -> None:
    """Where creation is not atomic, a writer that died leaves a piece of it. Who has no lease must wait."""
    store.put("best/.reserved.json", b'{"format":"holdfast.res')
    with pytest.raises(NameTaken):
        reserve(store, name="best")
    assert reserve(store, name="best", epoch=2).epoch == 2


def test_a_later_epoch_takes_a_name_over(store: FarStore, source: Path) -> None:
    draft = reserve(store, name="best", epoch=1)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    with pytest.raises(NameTaken):
        reserve(store, name="best", epoch=1)
    taken = reserve(store, name="best", epoch=2)
    with pytest.raises(Fenced, match="cleared away"):
        commit(store, draft, files)
    abandon(store, draft)
    assert read_reservation(store, "best") is not None, "a fenced writer must not abandon its successor's draft"
    files = upload_part(store, taken, source, rank=0, parent_files=None)
    assert commit(store, taken, files).epoch == 2


def test_a_fenced_writers_late_manifest_does_not_end_its_successor(store: FarStore, source: Path) -> None:
    """The first is paused after it saw its own reservation, and creates its manifest when the name is its
    successor's."""
    store.put(epoch_key(1), b"{}")
    late = reserve(store, name="best", epoch=1)
    store.put(epoch_key(2), b"{}")
    taken = reserve(store, name="best", epoch=2)
    files = upload_part(store, taken, source, rank=0, parent_files=None)
    assert write_tombstone(store, "best", index=late.index, epoch=1, token=late.token)
    done = commit(store, taken, files)
    assert (done.epoch, done.token) == (2, taken.token)
    assert verify(store, deep=True).ok == [done]


def test_a_fenced_writer_neither_reserves_nor_deletes(store: FarStore, source: Path) -> None:
    store.put(epoch_key(1), b"{}")
    draft = reserve(store, name="best", epoch=1)
    upload_part(store, draft, source, rank=0, parent_files=None)
    before = [entry.key for entry in store.list("best")]
    store.put(epoch_key(2), b"{}")
    abandon(store, draft)
    assert [entry.key for entry in store.list("best")] == before
    for name in ("other", None):
        with pytest.raises(Fenced, match="took the run over"):
            reserve(store, name=name, epoch=1)


class PausedWriter(FarStore):
    """Stands still before it creates a reservation, or what is named otherwise."""

    before = layout.RESERVED
    action: Callable[[], None] | None = None

    def create(self, key: str, data: bytes) -> None:
        self._pause(key)
        super().create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._pause(key)
        super().put(key, data)

    def _pause(self, key: str) -> None:
        if key.endswith(self.before) and self.action is not None:
            action, self.action = self.action, None
            action()


@pytest.mark.parametrize("name", [None, "another"])
def test_a_writer_that_stood_still_before_it_reserved_does_not_commit_under_its_successor(
    name: str | None, source: Path, tmp_path: Path
) -> None:
    """Meanwhile a user takes the index, and the next controller has chosen its floor above it and begun."""
    store, other = PausedWriter(tmp_path / "run"), FarStore(tmp_path / "run")
    other.put(epoch_key(1), b"{}")

    def take_over() -> None:
        commit_directory(other, source, name="a")
        other.put(epoch_key(2), b"{}")
        floor = Catalog(other).survey().next_index()
        other.put(floor_key(2), json.dumps({"epoch": 2, "floor": floor}).encode())
        assert Catalog(other).void_drafts(2, floor) == []

    store.action = take_over
    with pytest.raises(Fenced, match="took the run over while a checkpoint was begun"):
        commit(store, reserve(store, name=name, epoch=1), [])
    assert [found.name for found in Catalog(other).committed()] == ["a"]


def test_a_writer_that_stood_still_before_its_manifest_does_not_commit_when_its_name_is_used_again(
    source: Path, tmp_path: Path
) -> None:
    """What kept it from that was the tombstone, which is gone: the name is its successor's, whose files are on their
    way."""
    store, other = PausedWriter(tmp_path / "run"), FarStore(tmp_path / "run")
    store.before = layout.MANIFEST
    other.put(epoch_key(1), b"{}")
    draft = reserve(store, name="best", epoch=1)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    drafts: list[Draft] = []

    def take_over() -> None:
        other.put(epoch_key(2), b"{}")
        floor = Catalog(other).survey().next_index()
        other.put(floor_key(2), json.dumps({"epoch": 2, "floor": floor}).encode())
        assert Catalog(other).void_drafts(2, floor) == ["best"]
        drafts.append(reserve(other, name="best", epoch=2))

    store.action = take_over
    with pytest.raises(Fenced, match="took the run over"):
        commit(store, draft, files)
    assert Catalog(other).committed() == [] and verify(other).ok == []
    files = upload_part(other, drafts[0], source, rank=0, parent_files=None)
    done = commit(other, drafts[0], files)
    assert (done.token, verify(other, deep=True).ok) == (drafts[0].token, [done])


def test_a_late_tombstone_for_the_draft_before_does_not_end_the_one_that_has_its_name(
    store: FarStore, source: Path
) -> None:
    """`repair` stood still before it created it, after it had seen that its draft was still there, and the epoch of the
    controller that uses the name again."""
    store.put(epoch_key(1), b"{}")
    before = reserve(store, name="best", epoch=1)
    store.put(epoch_key(2), b"{}")
    taken = reserve(store, name="best", epoch=2)
    files = upload_part(store, taken, source, rank=0, parent_files=None)
    assert write_tombstone(store, "best", index=before.index, epoch=2, token=before.token)
    assert verify(store, deep=True).ok == [] and commit(store, taken, files).token == taken.token
    assert [found.token for found in verify(store, deep=True).ok] == [taken.token]


def test_a_commit_whose_answer_was_lost_may_be_repeated(store: FarStore, source: Path) -> None:
    draft = reserve(store)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    first = commit(store, draft, files, created_at="2026-01-01T00:00:00.000Z")
    assert commit(store, draft, files) == first
    abandon(store, draft)
    assert verify(store, deep=True).ok == [first]


def test_abandoned_drafts_are_invisible(store: FarStore, source: Path) -> None:
    draft = reserve(store)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    abandon(store, draft)
    assert [entry.key for entry in store.list()] == [f"{draft.name}/.manifest.json", f"{draft.name}/.reserved.json"]
    with pytest.raises(Fenced):
        commit(store, draft, files)
    assert Catalog(store).committed() == []
    custom = reserve(store, name="best")
    abandon(store, custom)
    assert reserve(store, name="best").name == "best"


class FullStore(FarStore):
    """A disk that fills up in the middle of an upload, and then has no room for a tombstone either."""

    full = False

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        if key.endswith("model"):
            self.full = True
            raise OutOfSpace("full")
        return super().upload(key, source, on_bytes)

    def create(self, key: str, data: bytes) -> None:
        if self.full:
            raise OutOfSpace("full")
        super().create(key, data)


def test_a_commit_that_fails_on_a_full_disk_removes_its_files(source: Path, tmp_path: Path) -> None:
    store = FullStore(tmp_path / "run")
    with pytest.raises(OutOfSpace):
        commit_directory(store, source)
    assert store.list() == []


class SilentStore(FarStore):
    """Stores a manifest, and does not answer any more."""

    silent = False

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        self.silent = key.endswith(layout.MANIFEST)
        self._answer()

    def get(self, key: str) -> bytes:
        self._answer()
        return super().get(key)

    def _answer(self) -> None:
        if self.silent:
            raise Unavailable("no answer")


def test_files_of_a_commit_with_an_unknown_outcome_are_kept(source: Path, tmp_path: Path) -> None:
    store = SilentStore(tmp_path / "run")
    with pytest.raises(Unavailable):
        commit_directory(store, source)
    store.silent = False
    assert [found.name for found in verify(store, deep=True).ok] == ["checkpoint_000000"]


class LateFullStore(FarStore):
    """A disk on which the manifest gets its name, and the fsync that follows finds no space, nor does anything after
    it; `unsynced` says how often the directory cannot be synced afterwards."""

    full = False
    unsynced = 0

    def create(self, key: str, data: bytes) -> None:
        if not self.full:
            super().create(key, data)
            self.full = key.endswith(layout.MANIFEST)
        if self.full:
            raise OutOfSpace("full")

    def delete(self, keys: Iterable[str]) -> None:
        super().delete(keys)
        if self.full and self.unsynced:
            self.unsynced -= 1
            raise OutOfSpace("full")


@pytest.mark.parametrize("name", [None, "best"])
def test_a_disk_full_after_the_manifest_was_linked_still_commits(
    source: Path, tmp_path: Path, name: str | None
) -> None:
    store = LateFullStore(tmp_path / "run")
    done = commit_directory(store, source, name=name)
    assert verify(store, deep=True).ok == [done]


@pytest.mark.parametrize("name", [None, "best"])
def test_files_of_a_visible_commit_stay_where_it_cannot_be_made_durable(
    source: Path, tmp_path: Path, name: str | None
) -> None:
    store = LateFullStore(tmp_path / "run")
    store.unsynced = 1
    with pytest.raises(OutOfSpace):
        commit_directory(store, source, name=name)
    report = verify(store, deep=True)
    assert [found.name for found in report.ok] == [name or "checkpoint_000000"]
    assert report.intact


class DeafStore(FarStore):
    """Makes a reservation, and its answer is lost."""

    lost = 1

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        self._lose(key)

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self._lose(key)

    def _lose(self, key: str) -> None:
        if key.endswith(layout.RESERVED) and self.lost:
            self.lost -= 1
            raise Unavailable("no answer")


@pytest.mark.parametrize("exclusive", [True, False], ids=["exclusive", "not exclusive"])
@pytest.mark.parametrize("name", [None, "best"])
def test_a_reservation_whose_answer_was_lost_is_recognised_by_its_token(
    source: Path, tmp_path: Path, name: str | None, exclusive: bool
) -> None:
    store = DeafStore(tmp_path / "run", exclusive)
    store.lost = 0
    commit_directory(store, source)
    store.lost = 1
    token = "0123456789abcdef" * 2
    with pytest.raises(Unavailable):
        reserve(store, name=name, epoch=1, at_least=1, token=token)
    draft = reserve(store, name=name, epoch=1, at_least=1, token=token)
    assert draft == Draft(name=name or "checkpoint_000001", index=1, epoch=1, token=token, parent="checkpoint_000000")
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    done = commit(store, draft, files)
    assert Catalog(store).newest() == done
    assert Catalog(store).leftovers() == []
    with pytest.raises(NameTaken):
        reserve(store, name=done.name, epoch=1)


def test_symbolic_links_are_followed_and_loops_refused(store: FarStore, source: Path, tmp_path: Path) -> None:
    (source / "linked").symlink_to(write_source(tmp_path / "elsewhere", x="y"))
    (source / "file").symlink_to(source / "model")
    assert [one.path for one in commit_directory(store, source).files] == ["file", "layers/0", "linked/x", "model"]
    (source / "layers" / "up").symlink_to(source)
    with pytest.raises(ConfigError, match="above it"):
        commit_directory(store, source)
    (source / "layers" / "up").unlink()
    (source / "nowhere").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="link to nothing"):
        commit_directory(store, source)


def test_special_files_and_reserved_names_are_refused(
    store: FarStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".manifest.json", ".reserved.json", ".claim-1.json"):
        (source / name).write_text("mine")
        with pytest.raises(ConfigError, match="rename the file"):
            commit_directory(store, source)
        (source / name).unlink()
    monkeypatch.chdir(source)  # a whole path may be too long for a socket
    with socket.socket(socket.AF_UNIX) as plug:
        plug.bind("plug")
        with pytest.raises(ConfigError, match="no plain file"):
            commit_directory(store, source)
    with pytest.raises(ConfigError, match="not a directory"):
        commit_directory(store, tmp_path / "missing")
    assert Catalog(store).committed() == []


def test_a_copy_of_a_checkpoint_may_be_committed_again(store: FarStore, source: Path, tmp_path: Path) -> None:
    local = PosixStore(tmp_path / "local")
    first = commit_directory(local, source)
    done = commit_directory(store, tmp_path / "local" / first.name)
    assert [(one.path, one.blake3) for one in done.files] == [(one.path, one.blake3) for one in first.files]


def test_metrics_are_checked_before_anything_is_written(store: FarStore, source: Path) -> None:
    with pytest.raises(ConfigError, match="metrics"):
        commit_directory(store, source, metrics={"bad": object()})
    assert store.list() == []


def test_a_failed_file_stops_the_others(store: FarStore, source: Path) -> None:
    def fail(_: int) -> None:
        raise CheckpointError("enough")

    with pytest.raises(CheckpointError):
        commit_directory(store, source, on_bytes=fail)
    assert store.list() == []


def test_a_claim_of_a_dead_writer_does_not_block_a_reservation(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_TRUSTED_S", 0.0)
    store = FarStore(tmp_path / "run", exclusive=False)
    gone = msgspec.structs.replace(this_process(), started_ticks=1)
    for name in ("a", "checkpoint_000001"):
        claim = claims.Claim(key=f"{name}/.reserved.json", token="00", writer=gone)
        store.put(f"{name}/.claim-.reserved.json-00.json", msgspec.json.encode(claim))
    assert commit_directory(store, source, name="a").name == "a"
    assert commit_directory(store, source).name == "checkpoint_000003"
    assert not any(layout.CLAIM_PREFIX in entry.key for entry in store.list("a"))


def test_a_writer_that_is_overtaken_between_its_claim_and_its_reservation_is_fenced(tmp_path: Path) -> None:
    """Its claim counted when the newer controller chose the floor, and its reservation came after drafts were voided:
    what it commits would count, and its reports would not."""

    class Overtaken(FarStore):
        def create(self, key: str, data: bytes) -> None:
            if key.endswith(f"/{layout.RESERVED}"):
                super().create(epoch_key(2), b"{}")
            super().create(key, data)

    with pytest.raises(Fenced, match="took the run over while a checkpoint was begun"):
        reserve(Overtaken(tmp_path / "run", exclusive=False), epoch=1)


def test_repair_removes_what_a_dead_writer_only_claimed(tmp_path: Path) -> None:
    store = FarStore(tmp_path / "run", exclusive=False)
    gone = msgspec.structs.replace(this_process(), started_ticks=1)
    for name, writer in (("checkpoint_000001", gone), ("checkpoint_000002", this_process())):
        claim = claims.Claim(key=f"{name}/.reserved.json", token="00", writer=writer, created_at=now_text())
        store.put(f"{name}/{layout.CLAIM_KEEP}", b"")
        store.put(f"{name}/.claim-.reserved.json-00.json", msgspec.json.encode(claim))
    report = verify(store)
    assert [found.name for found in report.leftovers] == ["checkpoint_000001", "checkpoint_000002"]
    assert repair(store, report, older_than_s=60.0) == ["checkpoint_000001"]
    assert store.children() == ["checkpoint_000002"]


def test_a_directory_that_is_or_holds_the_run_is_refused(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "storage" / "run")
    commit_directory(store, write_source(tmp_path / "source", model="weights"))
    (tmp_path / "link").symlink_to(tmp_path / "storage")
    for wrong in (tmp_path, tmp_path / "storage", tmp_path / "storage" / "run", tmp_path / "link"):
        with pytest.raises(ConfigError, match="is or contains the run"):
            commit_directory(store, wrong)
    assert store.children() == ["checkpoint_000000"]

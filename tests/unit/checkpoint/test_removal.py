"""Removing a checkpoint: only the one with the right token, only by the lease holder, also on a full disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from tests.mounts import tmpfs
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit, commit_directory, reserve, upload_part
from holdfast.checkpoint.epochs import epoch_key, floor_key, read_fences
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.part_records import write_part_record
from holdfast.checkpoint.removal import is_pinned, pin, remove
from holdfast.checkpoint.verify import repair, verify
from holdfast.cli.main import main
from holdfast.core.checkpoint_types import CheckpointInfo
from holdfast.errors import Fenced, NotCommitted, OutOfSpace, Pinned
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Entry, Store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", model="weights", layers__0="zero")


class PausedStore(FarStore):
    """Records each call that reads or deletes, and runs `action` before the one of that number."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls: list[str] = []
        self.pause_before: int | None = None
        self.action: Callable[[], None] = lambda: None

    def get(self, key: str) -> bytes:
        self._call(f"get {key}")
        return super().get(key)

    def size(self, key: str) -> int:
        self._call(f"size {key}")
        return super().size(key)

    def list(self, prefix: str = "") -> list[Entry]:
        self._call(f"list {prefix}")
        return super().list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        doomed = list(keys)
        self._call(f"delete {doomed}")
        super().delete(doomed)

    def _call(self, what: str) -> None:
        if len(self.calls) == self.pause_before:
            self.pause_before = None
            self.action()
        self.calls.append(what)


def take_over_and_commit(root: Path, source: Path, token: str) -> Manifest:
    """A second controller takes the run over, removes the checkpoint `a`, and uses its name again."""
    store = FarStore(root)
    store.put(epoch_key(2), json.dumps({"epoch": 2}).encode())
    floor = Catalog(store).survey().next_index()
    store.put(floor_key(2), json.dumps({"epoch": 2, "floor": floor}).encode())
    try:
        remove(store, "a", token=token)
    except NotCommitted:
        assert Catalog(store).read_manifest("a").manifest is None
    draft = reserve(store, name="a", epoch=2, at_least=floor)
    return commit(store, draft, upload_part(store, draft, source, rank=0, parent_files=None))


def test_a_paused_removal_does_not_delete_a_successors_commit(source: Path, tmp_path: Path) -> None:
    """Paused before each check; between the last check and the deletion itself nothing can be noticed."""

    def prepare(number: int) -> tuple[PausedStore, Manifest, Callable[[], None]]:
        store = PausedStore(tmp_path / f"run-{number}")
        store.put(epoch_key(1), json.dumps({"epoch": 1}).encode())
        store.put(floor_key(1), json.dumps({"epoch": 1, "floor": 0}).encode())
        draft = reserve(store, name="a", epoch=1)
        doomed = commit(store, draft, upload_part(store, draft, source, rank=0, parent_files=None))

        def check_lease() -> None:
            if read_fences(store).highest > 1:
                raise Fenced("taken over")

        store.calls.clear()
        return store, doomed, check_lease

    store, doomed, check_lease = prepare(0)
    remove(store, "a", token=doomed.token, check_lease=check_lease)
    assert store.children() == ["epochs"]
    looks = [at for at, call in enumerate(store.calls) if not call.startswith("delete")]
    assert len(looks) > 5
    for at in looks:
        store, doomed, check_lease = prepare(1 + at)
        successors: list[Manifest] = []
        store.pause_before = at
        root, token = tmp_path / f"run-{1 + at}", doomed.token
        store.action = lambda root=root, token=token, found=successors: found.append(  # type: ignore[misc]
            take_over_and_commit(root, source, token)
        )
        try:
            remove(store, "a", token=doomed.token, check_lease=check_lease)
        except (Fenced, NotCommitted):
            pass
        report = verify(store, deep=True)
        assert (report.ok, report.damaged) == (successors, {}), store.calls[at]


def test_a_pin_that_was_confirmed_during_a_removal_keeps_the_checkpoint(source: Path, tmp_path: Path) -> None:
    """Pinned before each request of the removal: the checkpoint stays whole, or the pin is refused."""
    first = PausedStore(tmp_path / "count")
    commit_directory(first, source, name="a")
    first.calls.clear()
    remove(first, "a")
    confirmed = 0
    for at in range(len(first.calls)):
        store = PausedStore(tmp_path / f"run-{at}")
        done = commit_directory(store, source, name="a")
        store.calls.clear()
        refusals: list[NotCommitted] = []

        def pin_now(root: Path = tmp_path / f"run-{at}", found: list[NotCommitted] = refusals) -> None:
            try:
                pin(FarStore(root), "a")
            except NotCommitted as error:
                found.append(error)

        store.pause_before, store.action = at, pin_now
        if _removed(store):
            assert refusals, first.calls[at]
        else:
            confirmed += 1
            assert verify(store, deep=True).ok == [done]
    assert 0 < confirmed < len(first.calls)


def _removed(store: Store) -> bool:
    try:
        remove(store, "a")
    except Pinned:
        return False
    return True


def test_a_removal_deletes_only_the_checkpoint_with_its_token(source: Path, tmp_path: Path) -> None:
    store = FarStore(tmp_path / "run")
    first = commit_directory(store, source, name="a")
    remove(store, "a", token=first.token)
    second = commit_directory(store, source, name="a")
    with pytest.raises(NotCommitted, match="replaced by another"):
        remove(store, "a", token=first.token)
    assert verify(store).ok == [second]


def test_an_interrupted_removal_is_finished_by_its_token(source: Path, tmp_path: Path) -> None:
    store = FarStore(tmp_path / "run")
    done = commit_directory(store, source)
    store.delete([f"{done.name}/.manifest.json", f"{done.name}/model"])
    with pytest.raises(NotCommitted, match="repair"):
        remove(store, done.name)
    with pytest.raises(NotCommitted):
        remove(store, done.name, token="another")
    remove(store, done.name, token=done.token)
    assert store.list() == []


def test_what_an_interrupted_removal_leaves_is_not_committed_again(source: Path, tmp_path: Path) -> None:
    """Also where part records stayed in the directory when a dead controller's checkpoint was completed."""

    class Died(BaseException):
        pass

    def die() -> None:
        raise Died

    store = PausedStore(tmp_path / "run")
    draft = reserve(store, epoch=1)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    info = CheckpointInfo(ranks=(0,), world_size=1, iteration=1, metrics={})
    write_part_record(store, draft, info, 0, files, generation=1)
    done = commit(store, draft, files)
    store.calls.clear()
    store.action, store.pause_before = die, -1
    for at in range(100):
        store.pause_before = at
        store.calls.clear()
        try:
            remove(store, done.name, token=done.token)
            break
        except Died:
            if Catalog(store).read_manifest(done.name).manifest is None:
                Catalog(store).void_drafts(2, floor=100)
                assert Catalog(store).committed() == []
                return
    raise AssertionError("it was never interrupted between the manifest and the rest")


def test_removing_a_pinned_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    store = FarStore(tmp_path / "run")
    done = commit_directory(store, source)
    pin(store, done.name)
    with pytest.raises(Pinned, match="unpin"):
        remove(store, done.name, token=done.token)
    assert verify(store).ok == [done]


def test_pinning_a_removed_checkpoint_is_an_error_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    store = PausedStore(tmp_path / "run")
    done = commit_directory(store, source)

    class LatePin(FarStore):
        def put(self, key: str, data: bytes) -> None:
            remove(store, done.name)
            super().put(key, data)

    with pytest.raises(NotCommitted):
        pin(LatePin(tmp_path / "run"), done.name)
    assert store.list() == []
    assert not is_pinned(store, done.name)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small") as path:
        yield path


def fill(store: Store, place: Path) -> None:
    with (place / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    with pytest.raises(OutOfSpace):
        store.put("one", b"byte")


@pytest.mark.hosts
def test_checkpoints_are_removed_where_no_byte_is_free(small: Path, source: Path) -> None:
    store = PosixStore(small / "run")
    first, second, third = (commit_directory(store, source) for _ in range(3))
    fill(store, small)
    remove(PosixStore(small / "run"), first.name, token=first.token)
    assert not (small / "run" / first.name).exists()
    fill(store, small)
    assert main(["ckpt", "rm", str(small / "run" / second.name)]) == 0
    assert not (small / "run" / second.name).exists()
    assert verify(store, deep=True).ok == [third]


@pytest.mark.hosts
def test_what_a_dead_writer_left_is_repaired_where_no_byte_is_free(small: Path, source: Path) -> None:
    store = PosixStore(small / "run")
    kept = commit_directory(store, source)
    pid = os.fork()
    if pid == 0:
        draft = reserve(store)
        upload_part(store, draft, source, rank=0, parent_files=None)
        os._exit(0)
    os.waitpid(pid, 0)
    fill(store, small)
    assert repair(PosixStore(small / "run"), verify(store)) == ["checkpoint_000001"]
    assert store.children() == [kept.name]

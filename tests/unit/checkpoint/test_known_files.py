"""A parent's file is reused, and a verified file not read again, only while its bytes are known to be right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.programs.altering import flip_byte
from tests.unit.checkpoint.far_store import FarStore, write_source
from tests.unit.worker.fake_agent import FakeAgent

from holdfast.checkpoint.commit import commit, commit_directory, reserve
from holdfast.checkpoint.known_files import KnownFiles, process_wide
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.restore import verify_in_place
from holdfast.checkpoint.upload import upload_memory
from holdfast.checkpoint.verify import verify
from holdfast.errors import Damaged, NotFound
from holdfast.storage.hashing import digest_file
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Digest, Store


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    process_wide.clear()
    yield
    process_wide.clear()


def _make(kind: str, root: Path) -> Store:
    return PosixStore(root) if kind == "local" else FarStore(root)


def _commit(store: Store, source: Path, how: str) -> Manifest:
    if how == "directory":
        return commit_directory(store, source)
    files = {path.name: memoryview(path.read_bytes()) for path in source.iterdir()}
    draft = reserve(store)
    parents = [manifest for manifest in verify(store, deep=False).ok if manifest.name == draft.parent]
    parent_files = parents[0].files if parents else None
    return commit(store, draft, upload_memory(store, draft, files, rank=0, parent_files=parent_files))


@pytest.mark.parametrize("remembers", [True, False], ids=["same-process", "new-process"])
@pytest.mark.parametrize("how", ["directory", "memory"])
@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_flipped_bit_does_not_spread_to_later_commits(tmp_path: Path, kind: str, how: str, remembers: bool) -> None:
    store = _make(kind, tmp_path / "run")
    source = write_source(tmp_path / "source", model="weights", step="0")
    first = _commit(store, source, how)
    flip_byte(tmp_path / "run" / first.name / "model")
    for step in range(1, 4):
        if not remembers:
            process_wide.clear()
        write_source(source, step=str(step))
        _commit(store, source, how)
    report = verify(store, deep=True)
    assert list(report.damaged) == [first.name]
    assert len(report.ok) == 3


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_an_unchanged_file_of_an_intact_parent_is_not_sent_again(tmp_path: Path, kind: str) -> None:
    store = _make(kind, tmp_path / "run")
    source = write_source(tmp_path / "source", model="weights", step="0")
    for step in range(4):
        write_source(source, step=str(step))
        commit_directory(store, source)
    if isinstance(store, FarStore):
        assert [key for key in store.uploads if key.endswith("model")] == ["checkpoint_000000/model"]
    inodes = {(tmp_path / "run" / manifest.name / "model").stat().st_ino for manifest in verify(store).ok}
    assert len(inodes) == 1, "the four checkpoints share one file"


def test_a_link_does_not_make_the_next_commit_read_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PosixStore(tmp_path / "run")
    source = write_source(tmp_path / "source", model="weights")
    commit_directory(store, source)
    read: list[str] = []
    monkeypatch.setattr("holdfast.checkpoint.known_files.digest_stored", lambda store, key, on_bytes: read.append(key))
    for _ in range(3):
        commit_directory(store, source)
    assert read == []


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    store, known = PosixStore(tmp_path), KnownFiles()
    read: list[int] = []
    store.put("a/k", b"one")
    digest = known.read_digest(store, "a/k", read.append)
    assert known.read_digest(store, "a/k", read.append) == digest == known.digest(store.sub("a"), "k")
    assert read == [3]
    flip_byte(tmp_path / "a" / "k")
    assert known.digest(store, "a/k") is None
    altered = known.read_digest(store, "a/k", read.append)
    assert altered == digest_file(tmp_path / "a" / "k") != digest
    assert read == [3, 3]
    os.link(tmp_path / "a" / "k", tmp_path / "other")
    assert known.digest(store, "a/k") is None, "in doubt nothing is known"
    store.delete(["a/k"])
    with pytest.raises(NotFound):
        known.read_digest(store, "a/k")


def test_a_checkpoint_that_this_process_wrote_is_verified_without_reading_it(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    source = write_source(tmp_path / "source", model="weights", layers__0="zero")
    read: list[int] = []
    for _ in range(2):  # the second shares its files with the first
        done = commit_directory(store, source)
        verified = verify_in_place(store, done.name, on_bytes=read.append)
        assert [file.path for file in verified] == ["layers/0", "model"]
    assert read == []
    process_wide.clear()
    assert verify_in_place(store, done.name, on_bytes=read.append) == verified
    assert sorted(read) == [4, 7]


def test_a_worker_does_not_read_what_its_agent_verified(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "run")
    done = commit_directory(store, write_source(tmp_path / "source", model="weights"))
    verified = verify_in_place(store, done.name)
    process_wide.clear()  # a worker is another process
    with FakeAgent(storage=str(tmp_path / "run"), checkpoint=done.name, verified=verified) as agent:
        found = agent.session._handle(done.name)
        assert process_wide.digest(store, f"{done.name}/model") == (7, done.files[0].blake3)
        with found.as_directory() as directory:
            assert Path(directory, "model").read_text() == "weights"
        flip_byte(Path(found.path, "model"))
        with pytest.raises(Damaged), found.as_directory():
            pytest.fail("what changed after the agent looked was given out")
        assert agent.session.checkpoint_at(found.path) == done.name
        assert agent.session.checkpoint_at(str(tmp_path / "source")) is None


def test_the_least_recently_used_digest_is_dropped(tmp_path: Path) -> None:
    store, known = PosixStore(tmp_path), KnownFiles(limit=2)
    for key in "abc":
        store.put(key, key.encode())
        known.wrote(store, key, Digest(1, key * 64))
    assert [known.digest(store, key) is not None for key in "abc"] == [False, True, True]


def test_digests_are_not_remembered_on_storage_without_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, known = FarStore(tmp_path), KnownFiles()
    monkeypatch.setattr(FarStore, "version", lambda self, key: None)
    store.put("k", b"one")
    known.wrote(store, "k", Digest(3, "0" * 64))
    assert known.digest(store, "k") is None
    assert known.read_digest(store, "k").size_bytes == 3

"""Uploading from memory: files that the parent has are copied in storage, all others are sent unchanged."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from blake3 import blake3

from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.reserve import reserve
from holdfast.checkpoint.upload import upload_memory
from holdfast.checkpoint.verify import verify
from holdfast.core.checkpoint_types import FileEntry
from holdfast.errors import CheckpointError, ConfigError
from holdfast.storage.hashing import digest_memory
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Digest, OnBytes, Store


def _store_checkpoint(
    store: Store,
    files: Mapping[str, bytes],
    parent: Sequence[FileEntry] = (),
    threads: int = 4,
    samples: dict[str, str] | None = None,
) -> tuple[list[FileEntry], int]:
    sent: list[int] = []
    draft = reserve(store, epoch=0)
    entries = upload_memory(
        store,
        draft,
        {path: memoryview(data) for path, data in files.items()},
        rank=3,
        parent_files=parent,
        samples=samples,
        threads=threads,
        on_sent=sent.append,
    )
    commit(store, draft, tuple(entries), metrics={}, world_size=1, generation=1, iteration=1)
    return entries, sum(sent)


@pytest.mark.parametrize("threads", [1, 4])
def test_only_changed_files_of_a_snapshot_are_uploaded(tmp_path: Path, threads: int) -> None:
    store = PosixStore(tmp_path)
    files = {f"part/{number}": os.urandom(3_000_000 + number % 2) for number in range(5)} | {"empty": b""}
    entries, sent = _store_checkpoint(store, files, threads=threads)
    assert sent == sum(map(len, files.values()))
    assert [entry.path for entry in entries] == sorted(files)
    assert all(entry.blake3 == blake3(files[entry.path]).hexdigest() and entry.rank == 3 for entry in entries)
    changed = files | {"part/0": os.urandom(3_000_000)}
    again, sent = _store_checkpoint(store, changed, entries, threads)
    assert sent == 3_000_000
    assert store.get("checkpoint_000001/part/0") == changed["part/0"]
    assert verify(store, deep=True).intact
    same = (tmp_path / "checkpoint_000000" / "part/1").stat(), (tmp_path / "checkpoint_000001" / "part/1").stat()
    assert same[0].st_ino == same[1].st_ino or same[0].st_blocks  # a hard link, or a reflink
    assert {entry.path for entry in again} == set(files)


def test_files_whose_samples_changed_are_not_hashed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, samples = PosixStore(tmp_path), dict[str, str]()
    hashed: list[int] = []

    def spied(view: memoryview, on_block: OnBytes | None = None) -> Digest:
        hashed.append(view.nbytes)
        return digest_memory(view, on_block)

    monkeypatch.setattr("holdfast.checkpoint.upload.digest_memory", spied)
    first = bytearray(os.urandom(3_000_000))
    entries, _ = _store_checkpoint(store, {"a": bytes(first), "b": b"b" * 100_000}, samples=samples)
    everywhere = {"a": os.urandom(3_000_000), "b": b"b" * 100_000}
    entries, sent = _store_checkpoint(store, everywhere, entries, samples=samples)
    assert (hashed, sent) == ([100_000], 3_000_000)
    somewhere = bytearray(everywhere["a"])
    somewhere[5000] ^= 1  # between the samples
    entries, sent = _store_checkpoint(store, {**everywhere, "a": bytes(somewhere)}, entries, samples=samples)
    assert (sorted(hashed), sent) == ([100_000, 100_000, 3_000_000], 3_000_000)
    assert store.get("checkpoint_000002/a") == somewhere
    assert verify(store, deep=True).intact


def test_without_its_parent_a_snapshot_is_uploaded_whole(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    files = {"model": os.urandom(2_000_000)}
    entries, _ = _store_checkpoint(store, files)
    (tmp_path / "checkpoint_000000" / "model").unlink()
    _, sent = _store_checkpoint(store, files, entries)
    assert sent == 2_000_000
    assert store.get("checkpoint_000001/model") == files["model"]


def test_reserved_file_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.manifest\.json"):
        _store_checkpoint(PosixStore(tmp_path), {".manifest.json": b"{}"})


def test_hashing_can_be_cancelled(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    files = {"model": os.urandom(2_000_000)}
    entries, _ = _store_checkpoint(store, files)

    def refuse(count: int) -> None:
        raise CheckpointError("enough")

    with pytest.raises(CheckpointError, match="enough"):
        upload_memory(
            store,
            reserve(store, epoch=0),
            {"model": memoryview(files["model"])},
            rank=0,
            parent_files=entries,
            on_bytes=refuse,
        )

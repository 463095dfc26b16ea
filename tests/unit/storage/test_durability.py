"""Volatile writes cost no fsync, and making them durable costs one for each file and directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import AlreadyExists, NotFound
from holdfast.storage.durability import make_durable, volatile
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.retry import RetryingStore


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was fsynced; "file" for one that has no name yet."""
    names: list[str] = []
    fsync = os.fsync

    def noting_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115  no real path while it has no name
        names.append(path.name if path.exists() else "file")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    return names


def test_a_volatile_view_writes_without_fsync(tmp_path: Path, synced: list[str]) -> None:
    view = volatile(PosixStore(tmp_path / "root"))
    view.put("a/x", b"1")
    view.put("a/x", b"2")
    view.create("b", b"3")
    (tmp_path / "source").write_bytes(b"4")
    view.upload("c", tmp_path / "source")
    with pytest.raises(AlreadyExists):
        view.create("b", b"5")
    assert [view.get(key) for key in ("a/x", "b", "c")] == [b"2", b"3", b"4"]
    assert synced == []


def test_exclusive_creation_is_probed_without_fsync(tmp_path: Path, synced: list[str]) -> None:
    assert PosixStore(tmp_path / "root").exclusive
    assert synced == []


def test_each_file_and_directory_is_synced_once(tmp_path: Path, synced: list[str]) -> None:
    store = PosixStore(tmp_path / "above" / "root").sub("run")
    view = volatile(store)
    view.create("run.json", b"{}")
    view.create("epochs/1", b"1")
    view.create("epochs/2", b"2")
    make_durable(store, ["run.json", "epochs/1", "epochs/2"], ["journal"])
    files, directories = ["run.json", "1", "2"], [tmp_path.name, "above", "root", "run", "epochs"]
    assert synced == [*files, *directories]
    synced.clear()
    store.put("journal/x", b"")
    assert synced == ["file", "journal"]


def test_a_durable_write_makes_directories_durable_that_were_made_volatile(tmp_path: Path, synced: list[str]) -> None:
    store = PosixStore(tmp_path / "above" / "root")
    volatile(store).put("d/x", b"1")
    store.put("d/y", b"2")
    assert synced == [tmp_path.name, "above", "root", "file", "d"]


def test_what_is_not_there_cannot_be_made_durable(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        make_durable(PosixStore(tmp_path), ["x"])


def test_retries_stay_around_a_volatile_view(tmp_path: Path, synced: list[str]) -> None:
    store = RetryingStore(PosixStore(tmp_path))
    view = volatile(store)
    view.put("x", b"1")
    assert isinstance(view, RetryingStore) and synced == []
    make_durable(store, ["x"])
    assert synced == ["x", tmp_path.parent.name, tmp_path.name]

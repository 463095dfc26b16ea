"""The obligations of a store about uploads and downloads; inherited by `StoreContract` beside it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from blake3 import blake3

from holdfast.storage.store import Digest, Entry, InMemory, Store

__all__ = ["StoreTransfers"]

ODD_SIZE_BYTES = 9 * 1024 * 1024 + 12_345


class StoreTransfers:
    """Needs the fixture `store`."""

    hides_unfinished: ClassVar[bool] = True
    """False where an upload in progress is seen under its final name (FUSE mounts)."""

    @pytest.mark.parametrize("size_bytes", [0, 1, ODD_SIZE_BYTES])
    def test_upload_and_download(self, store: Store, tmp_path: Path, size_bytes: int) -> None:
        data = os.urandom(size_bytes)
        source, target, told = tmp_path / "source", tmp_path / "made" / "for it" / "target", list[int]()
        source.write_bytes(data)
        expected = Digest(size_bytes, blake3(data).hexdigest())
        assert store.upload("up/x y", source, told.append) == expected
        assert sum(told) == size_bytes
        assert store.list() == [Entry("up/x y", size_bytes)]
        assert store.get("up/x y") == data
        assert store.get_range("up/x y", size_bytes // 2, 5) == data[size_bytes // 2 :][:5]
        told.clear()
        assert store.download("up/x y", target, told.append) == expected
        assert sum(told) == size_bytes
        assert target.read_bytes() == data
        assert [path.name for path in target.parent.iterdir()] == ["target"]

    @pytest.mark.parametrize("size_bytes", [0, 1, 4096, ODD_SIZE_BYTES])
    @pytest.mark.parametrize("known", [False, True])
    def test_upload_from_memory(self, store: Store, size_bytes: int, known: bool) -> None:
        data, told = os.urandom(size_bytes), list[int]()
        expected = Digest(size_bytes, blake3(data).hexdigest())
        with mmap.mmap(-1, size_bytes + 3 * mmap.PAGESIZE) as memory, memoryview(memory) as whole:
            whole[mmap.PAGESIZE : mmap.PAGESIZE + size_bytes] = data
            with whole.toreadonly()[mmap.PAGESIZE : mmap.PAGESIZE + size_bytes] as view:
                assert store.upload("up/x y", InMemory(view, expected if known else None), told.append) == expected
        assert sum(told) == size_bytes
        assert store.list() == [Entry("up/x y", size_bytes)]
        assert store.get("up/x y") == data

    def test_memory_need_not_begin_at_a_page(self, store: Store) -> None:
        data = os.urandom(ODD_SIZE_BYTES)
        assert store.upload("k", InMemory(memoryview(data)[1:])) == Digest(len(data) - 1, blake3(data[1:]).hexdigest())
        assert store.get("k") == data[1:]

    def test_an_abandoned_upload_from_memory_leaves_nothing_whole(self, store: Store) -> None:
        data = os.urandom(ODD_SIZE_BYTES)
        with pytest.raises(_Abandoned):
            store.upload("dir/big", InMemory(memoryview(data)), _abandon_after(ODD_SIZE_BYTES // 2))
        whole = [entry for entry in store.list() if entry.size_bytes == ODD_SIZE_BYTES]
        assert (store.list() if self.hides_unfinished else whole) == []

    def test_upload_and_download_replace_what_was_there(self, store: Store, tmp_path: Path) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        target.write_bytes(b"t" * 10_000)
        store.put("k", b"k" * 10_000)
        source.write_bytes(b"short")
        store.upload("k", source)
        assert store.get("k") == b"short"
        store.download("k", target)
        assert target.read_bytes() == b"short"

    def test_an_abandoned_upload_leaves_nothing_whole(self, store: Store, tmp_path: Path) -> None:
        source, data = tmp_path / "source", os.urandom(ODD_SIZE_BYTES)
        source.write_bytes(data)
        with pytest.raises(_Abandoned):
            store.upload("dir/big", source, _abandon_after(ODD_SIZE_BYTES // 2))
        whole = [entry for entry in store.list() if entry.size_bytes == ODD_SIZE_BYTES]
        assert (store.list() if self.hides_unfinished else whole) == []
        assert store.upload("dir/big", source) == Digest(ODD_SIZE_BYTES, blake3(data).hexdigest())
        assert store.get("dir/big") == data

    def test_an_abandoned_download_leaves_nothing(self, store: Store, tmp_path: Path) -> None:
        store.put("k", os.urandom(1000))
        with pytest.raises(_Abandoned):
            store.download("k", tmp_path / "dir" / "target", _abandon_after(1))
        assert not (tmp_path / "dir").exists() or list((tmp_path / "dir").iterdir()) == []

    def test_a_missing_source_is_the_callers_fault(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            store.upload("k", tmp_path / "absent")
        assert store.list() == []

    def test_unfinished_writes_are_not_listed(self, store: Store, tmp_path: Path) -> None:
        if not self.hides_unfinished:
            pytest.skip("this storage shows what is being written")
        (tmp_path / "source").write_bytes(os.urandom(ODD_SIZE_BYTES))
        seen: list[list[Entry]] = []
        store.put("dir/other", b"1")
        store.upload("dir/big", tmp_path / "source", lambda count: seen.append(store.list()))
        assert seen and all(entries == [Entry("dir/other", 1)] for entries in seen)


class _Abandoned(Exception):
    """Raised by a progress callback to stop a transfer."""


def _abandon_after(limit_bytes: int) -> Callable[[int], None]:
    seen_bytes = 0

    def on_bytes(count: int) -> None:
        nonlocal seen_bytes
        seen_bytes += count
        if seen_bytes >= limit_bytes:
            raise _Abandoned

    return on_bytes

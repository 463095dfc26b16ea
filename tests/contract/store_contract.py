"""The contract of stores as tests: one class that each backend's test module inherits.

    class TestMine(StoreContract):
        supports_exclusive = False          # flags, where the backend differs; see the class

        @pytest.fixture
        def store(self) -> Iterator[Store]: # a fresh, empty root for each test
            ...

The obligations are those written in `holdfast.storage.store`. `store_race` beside it holds the ones about
concurrency and `store_transfer` those about whole files; their flags count too.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.store_race import StoreRaces
from tests.contract.store_transfer import StoreTransfers

from holdfast.errors import AlreadyExists, HoldfastError, NotFound, StorageError
from holdfast.storage.store import Entry, Store

__all__ = ["StoreContract"]

BAD_KEYS = ["../x", "/abs", "", "a//b", "a/./b", "a/../b", ".", "..", "a/", "a\0b", ".tmp-1-0123456789abcdef"]
STRANGE_KEYS = [
    "a b/c d.txt",
    "ünï/código/ключ/鍵.bin",
    "100%/per%20cent%zz",
    "ha#sh/#",
    "pl+us/a+b",
    "q?m=1&b=2",
    "'quoted' \"twice\"",
    ".hidden/.manifest.json",
    "~tilde/a:b,c;d@e=f!(g)[h]{i}",
    ".tmp-not-ours",
]


class StoreContract(StoreTransfers, StoreRaces):
    """Inherit, give the fixture `store`, and set what differs."""

    has_versions: ClassVar[bool] = True
    """Whether `version` gives a string; where not, it gives None."""
    reading_keeps_versions: ClassVar[bool] = True
    """Whether a version stays as it is while the bytes do. Where not, unchanged files are hashed again at times."""
    supports_exclusive: ClassVar[bool] = True
    """What `store.exclusive` must say, and whether `create` refuses a second creation."""
    model_examples: ClassVar[int] = 10
    """How many random histories are compared with a dict."""
    secrets: ClassVar[tuple[str, ...]] = ()
    """Credentials in use: none of them may show up in a URI, a repr, or an error and its causes."""

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)

    def test_put_then_get(self, store: Store) -> None:
        store.put("a/b/c.bin", b"\x00\xff bytes")
        assert store.get("a/b/c.bin") == b"\x00\xff bytes"
        assert store.size("a/b/c.bin") == 8
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert store.size("empty") == 0

    def test_overwrites_are_seen(self, store: Store) -> None:
        for size_bytes in (5000, 3, 70_000, 0):
            store.put("k", b"x" * size_bytes)
            assert store.get("k") == b"x" * size_bytes
            assert store.size("k") == size_bytes
            assert store.list() == [Entry("k", size_bytes)]

    def test_absent_keys(self, store: Store, tmp_path: Path) -> None:
        store.put("dir/file", b"1")
        for key in ("absent", "dir/absent", "dir", "dir/file/below", "no/such/dir/file"):
            for read in (store.get, store.size, store.version, lambda key: store.get_range(key, 0, 1)):
                with pytest.raises(NotFound):
                    read(key)
            with pytest.raises(NotFound):
                store.download(key, tmp_path / "target")
            with pytest.raises(NotFound):
                store.copy(key, "copied")
        assert list(tmp_path.iterdir()) == []
        assert store.list() == [Entry("dir/file", 1)]

    def test_create_refuses_a_second_creation(self, store: Store) -> None:
        assert store.exclusive is self.supports_exclusive
        assert store.list() == [], "the probe must leave nothing behind"
        store.create("once/x", b"first")
        assert store.get("once/x") == b"first"
        if self.supports_exclusive:
            for data in (b"second", b"first"):
                with pytest.raises(AlreadyExists):
                    store.create("once/x", data)
            assert store.get("once/x") == b"first"
        store.delete(["once/x"])
        store.create("once/x", b"third")
        assert store.get("once/x") == b"third"

    @pytest.mark.parametrize(
        ("start", "length", "expected"),
        [(0, 10, b"0123456789"), (0, 4, b"0123"), (3, 4, b"3456"), (8, 10, b"89"), (9, 1, b"9")]
        + [(0, 0, b""), (5, 0, b""), (10, 0, b""), (10, 5, b""), (11, 1, b""), (10_000, 1, b"")],
    )
    def test_get_range(self, store: Store, start: int, length: int, expected: bytes) -> None:
        store.put("digits", b"0123456789")
        assert store.get_range("digits", start, length) == expected

    def test_get_range_of_an_empty_object(self, store: Store) -> None:
        store.put("empty", b"")
        assert store.get_range("empty", 0, 0) == b""
        assert store.get_range("empty", 0, 5) == b""

    def test_list_is_deep_sorted_and_bounded_by_directory(self, store: Store) -> None:
        keys = ["a", "b/1", "b/2/3", "b/2/4", "b-c/1", "b.txt", "bb/1", "z"]
        for key in reversed(keys):
            store.put(key, key.encode())
        assert store.list() == [Entry(key, len(key)) for key in sorted(keys)]
        assert [entry.key for entry in store.list("b")] == ["b/1", "b/2/3", "b/2/4"]
        assert [entry.key for entry in store.list("b/2")] == ["b/2/3", "b/2/4"]
        assert store.list("a") == [], "an object is not a directory"
        assert store.list("absent") == [] == store.list("b/absent/deep")

    def test_children(self, store: Store) -> None:
        for key in ("file", "b/1", "b/2/3", "b/2/4/5", "bb/1", "c/d/e"):
            store.put(key, b"")
        assert store.children() == ["b", "bb", "c"]
        assert store.children("b") == ["2"]
        assert store.children("c") == ["d"]
        assert store.children("bb") == [] == store.children("absent") == store.children("file")

    def test_delete(self, store: Store) -> None:
        for key in ("a/b/c", "a/b/d", "a/e", "f"):
            store.put(key, b"1")
        store.delete(["a/b/c", "absent", "a/absent", "no/such/dir"])
        store.delete(iter(["a/b/c"]))
        store.delete([])
        assert [entry.key for entry in store.list()] == ["a/b/d", "a/e", "f"]
        store.delete(["a/b"])
        assert store.get("a/b/d") == b"1", "a directory is not an object"
        store.delete(entry.key for entry in store.list())
        assert store.list() == []
        assert store.children() == [], "directories left empty vanish"
        store.put("a", b"now a file")
        assert store.get("a") == b"now a file"

    def test_copy(self, store: Store) -> None:
        store.put("from/x", b"one")
        store.copy("from/x", "to/deep/y")
        store.copy("from/x", "to/deep/y")
        assert store.get("to/deep/y") == b"one"
        store.put("from/x", b"two")
        assert store.get("to/deep/y") == b"one", "a copy stays what it was"
        store.copy("from/x", "to/deep/y")
        assert store.get("to/deep/y") == b"two"
        store.delete(["from/x"])
        assert store.get("to/deep/y") == b"two"
        store.copy("to/deep/y", "to/deep/y")
        assert store.list() == [Entry("to/deep/y", 3)]

    def test_the_version_changes_with_the_bytes_and_not_by_reading(self, store: Store, tmp_path: Path) -> None:
        store.put("a/k", b"one")
        first = store.version("a/k")
        assert (first is not None) == self.has_versions
        store.get("a/k")
        store.get_range("a/k", 1, 1)
        store.list("a")
        store.download("a/k", tmp_path / "target")
        store.put("a/other", b"two")
        if self.reading_keeps_versions:
            assert store.version("a/k") == first == store.sub("a").version("k")
        seen = [first]
        for data in (b"two", b"six", b"ten"):
            store.put("a/k", data)
            seen.append(store.version("a/k"))
        (tmp_path / "source").write_bytes(b"ten" + bytes(10))
        store.upload("a/k", tmp_path / "source")
        seen.append(store.version("a/k"))
        if self.has_versions:
            assert len({seen[at] for at in range(5)}) == 5

    def test_copy_of_a_missing_source_leaves_the_target(self, store: Store) -> None:
        store.put("target", b"kept")
        with pytest.raises(NotFound):
            store.copy("absent/x", "target")
        assert store.get("target") == b"kept"

    @pytest.mark.parametrize("key", STRANGE_KEYS)
    def test_strange_keys(self, store: Store, tmp_path: Path, key: str) -> None:
        (tmp_path / "source").write_bytes(b"123")
        store.put(key, b"1")
        assert store.get(key) == b"1"
        assert store.list() == [Entry(key, 1)]
        store.upload(key, tmp_path / "source")
        assert store.get(key) == b"123"
        store.copy(key, f"copy of/{key}")
        assert store.list("copy of") == [Entry(f"copy of/{key}", 3)]
        assert store.sub("copy of").list() == [Entry(key, 3)]
        directory = key.rpartition("/")[0]
        assert store.list(directory) == ([Entry(key, 3)] if directory else store.list())
        store.delete([key, f"copy of/{key}"])
        assert store.list() == []

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused(self, store: Store, tmp_path: Path, key: str) -> None:
        (tmp_path / "source").write_bytes(b"123")
        store.put("good", b"1")
        calls: list[Callable[[], object]] = [
            lambda: store.put(key, b""),
            lambda: store.create(key, b""),
            lambda: store.get(key),
            lambda: store.get_range(key, 0, 1),
            lambda: store.size(key),
            lambda: store.version(key),
            lambda: store.delete([key]),
            lambda: store.copy("good", key),
            lambda: store.copy(key, "other"),
            lambda: store.upload(key, tmp_path / "source"),
            lambda: store.download(key, tmp_path / "target"),
        ]
        if key:
            calls += [lambda: store.list(key), lambda: store.children(key), lambda: store.sub(key)]
        for call in calls:
            with pytest.raises(HoldfastError):
                call()
        assert store.list() == [Entry("good", 1)]

    def test_sub(self, store: Store) -> None:
        inner = store.sub("a").sub("b c")
        assert isinstance(inner, Store)
        inner.put("d/e", b"1")
        inner.create("f", b"22")
        assert store.list() == [Entry("a/b c/d/e", 1), Entry("a/b c/f", 2)]
        assert inner.list() == [Entry("d/e", 1), Entry("f", 2)]
        assert inner.list("d") == [Entry("d/e", 1)]
        assert inner.children() == ["d"]
        assert inner.exclusive is self.supports_exclusive
        assert inner.uri != store.uri
        inner.delete(["d/e", "f"])
        assert store.list() == []
        if store.local_root is not None:
            assert inner.local_root == store.local_root / "a" / "b c"
            store.put("plain/file", b"plain")
            assert (store.local_root / "plain" / "file").read_bytes() == b"plain"

    def test_nothing_shows_a_credential(self, store: Store, tmp_path: Path) -> None:
        shown = [store.uri, repr(store), store.sub("x").uri, repr(store.sub("x"))]
        for call in (store.get, store.size, lambda key: store.download(key, tmp_path / "t")):
            with pytest.raises(StorageError) as caught:
                call("absent/key")
            shown += traceback.format_exception(caught.value)
            assert "absent/key" in str(caught.value), "an error names the key"
        for secret in self.secrets:
            assert not [text for text in shown if secret in text]

    def test_close_twice(self, store: Store) -> None:
        store.put("k", b"1")
        view = store.sub("x")
        view.put("k", b"2")
        store.close()
        store.close()

    def test_like_a_dict(self, store: Store) -> None:
        """Random histories give what a dict would."""
        count = 0

        @settings(
            max_examples=self.model_examples,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(st.lists(_operations, min_size=1, max_size=25))
        def histories(history: list[tuple[str, str, str, bytes]]) -> None:
            nonlocal count
            count += 1
            _compare_with_dict(store.sub(f"history-{count}"), history, self.supports_exclusive)

        histories()
        assert count


# Files f* and directories d* never share a name, so that no key lies below another.
_keys = st.builds(
    lambda directories, name: "/".join([*directories, name]),
    st.lists(st.sampled_from(["d1", "d 2"]), max_size=2),
    st.sampled_from(["f1", "f%2", "f3"]),
)
_operations = st.tuples(st.sampled_from(["put", "create", "delete", "copy"]), _keys, _keys, st.binary(max_size=6))


def _compare_with_dict(store: Store, history: list[tuple[str, str, str, bytes]], exclusive: bool) -> None:
    model: dict[str, bytes] = {}
    for verb, key, other, data in history:
        if verb == "put" or (verb == "create" and not exclusive):
            store.put(key, data)
            model[key] = data
        elif verb == "create" and key in model:
            with pytest.raises(AlreadyExists):
                store.create(key, data)
        elif verb == "create":
            store.create(key, data)
            model[key] = data
        elif verb == "delete":
            store.delete([key, other])
            model.pop(key, None)
            model.pop(other, None)
        elif key in model:
            store.copy(key, other)
            model[other] = model[key]
        else:
            with pytest.raises(NotFound):
                store.copy(key, other)
    assert store.list() == [Entry(key, len(model[key])) for key in sorted(model)]
    assert {entry.key: store.get(entry.key) for entry in store.list()} == model
    for prefix in ("", "d1", "d 2", "d1/d1"):
        below = [
            key[len(prefix) + 1 :] if prefix else key for key in model if key.startswith(f"{prefix}/" if prefix else "")
        ]
        assert store.children(prefix) == sorted({key.split("/")[0] for key in below if "/" in key})
        assert len(store.list(prefix)) == len(below)

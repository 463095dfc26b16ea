"""Storage paths and URIs, and the stores that they open."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError, InvalidURI, MissingExtra
from holdfast.storage.local_cache import local_cache_dir
from holdfast.storage.locate import default_storage_path, open_store
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.retry import RetryingStore


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HOLDFAST_STORAGE", "RAY_STORAGE", "HOLDFAST_LOCAL_CACHE_DIR", "RAY_AIR_LOCAL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_local_paths_in_every_form(home: Path, tmp_path: Path) -> None:
    expected = {
        "runs/a": tmp_path / "runs" / "a",
        "./runs/../b/": tmp_path / "b",
        ".": tmp_path,
        f"{tmp_path}/abs": tmp_path / "abs",
        "~/runs": home / "runs",
        "~": home,
        "./~x": tmp_path / "~x",
        f"file://{tmp_path}/with%20space%23": tmp_path / "with space#",
        f"FILE://localhost{tmp_path}/x": tmp_path / "x",
        "per%cent #hash": tmp_path / "per%cent #hash",
        "./s3:odd": tmp_path / "s3:odd",
    }
    for written, meant in expected.items():
        store = open_store(written)
        assert isinstance(store, PosixStore)
        assert store.local_root == meant, written
        assert open_store(store.uri).local_root == meant, "the URI finds it again"
    assert open_store(tmp_path / "path-like").local_root == tmp_path / "path-like"


def test_opening_a_store_creates_nothing(home: Path, tmp_path: Path) -> None:
    store = open_store("runs/a")
    assert store.list() == [] == store.list("x/y")
    assert store.children() == []
    store.delete(["a/b"])
    assert store.sub("x").list() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
    store.put("k", b"1")
    assert (tmp_path / "runs" / "a" / "k").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("a\0b", "is empty or not text"),
        ("ftp://host/x", "unknown scheme ftp://"),
        ("s3://", "names no bucket: write s3://bucket/prefix"),
        ("s3:///prefix", "names no bucket"),
        ("gs://user:secret@/prefix", "names no bucket"),
        ("s3://bucket/%zz", "write %25"),
        ("file:///a%2", "write %25"),
        ("file:///%ff", "not UTF-8"),
        ("file://relative/x", "write file:///"),
        ("file:///a?b=c", "%3F"),
        ("s3:/bucket/x", "write s3://"),
        ("gs:bucket", "write gs://"),
        ("~no-such-user-here/x", "no user's home"),
    ],
)
def test_bad_paths_are_refused_in_one_sentence(home: Path, written: str, said: str) -> None:
    with pytest.raises(InvalidURI) as caught:
        open_store(written)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_with_a_filesystem_has_no_scheme() -> None:
    with pytest.raises(InvalidURI, match=r"s3://bucket/x has a scheme beside a filesystem: write it without s3://"):
        open_store("s3://key:secret@bucket/x", filesystem=object())


@pytest.mark.parametrize(
    ("uri", "filesystem", "package", "command"),
    [
        ("s3://bucket/x", None, "obstore", "s3:// needs the object-store client; run: pip install 'holdfast[s3]'"),
        ("gs://bucket/x", None, "obstore", "pip install 'holdfast[gcs]'"),
        ("az://container/x", None, "obstore", "pip install 'holdfast[azure]'"),
        ("hdfs://host:8020/x", None, "pyarrow", "hdfs:// needs pyarrow; run: pip install 'holdfast[arrow]'"),
        ("bucket/x", object(), "pyarrow", "A filesystem needs pyarrow; run: pip install 'holdfast[arrow]'"),
    ],
)
def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, uri: str, filesystem: object, package: str, command: str
) -> None:
    really = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        # Our own module is imported anew, as in a process where the package never was.
        if name in ("holdfast.storage.objects.store", "holdfast.storage.arrow.store"):
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return really(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra) as caught:
        open_store(uri, filesystem)
    assert command in str(caught.value)


def test_an_unrelated_import_error_is_not_reported_as_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def broken(name: str, *rest: Any, **more: Any) -> Any:
        if name == "holdfast.storage.objects.store":
            raise ImportError("cannot import name 'x'", name="holdfast.storage.objects.store")
        return really(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(ImportError, match="cannot import name") as caught:
        open_store("s3://bucket/x")
    assert not isinstance(caught.value, MissingExtra)


def test_remote_stores_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    store = open_store("s3://bucket/prefix?region=us-east-1&endpoint_override=http://127.0.0.1:9")
    try:
        assert isinstance(store, RetryingStore)
        assert store.local_root is None
    finally:
        store.close()


def test_default_storage_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_storage_path() == str(home / "holdfast_results")
    monkeypatch.setenv("RAY_STORAGE", "s3://ray")
    assert default_storage_path() == "s3://ray"
    monkeypatch.setenv("HOLDFAST_STORAGE", "s3://ours")
    assert default_storage_path() == "s3://ours"
    monkeypatch.setenv("HOLDFAST_STORAGE", " ")
    assert default_storage_path() == "s3://ray"


def test_local_cache_dir(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert local_cache_dir() == home / ".cache" / "holdfast"
    assert not (home / ".cache").exists()
    monkeypatch.setenv("RAY_AIR_LOCAL_CACHE_DIR", "~/ray")
    assert local_cache_dir() == home / "ray"
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", "relative")
    assert local_cache_dir() == tmp_path / "relative"


def test_local_cache_dir_without_a_home(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/proc/no/home/here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # /proc is never writable, though root's access() says so; ask as the kernel would for anybody.
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/proc"))
    expected = tmp_path / f"holdfast-{os.getuid()}"
    assert local_cache_dir() == expected
    assert expected.stat().st_mode & 0o777 == 0o700
    assert local_cache_dir() == expected
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    (tmp_path / "holdfast-4242").mkdir()
    with pytest.raises(ConfigError, match=r"belongs to another user.*HOLDFAST_LOCAL_CACHE_DIR"):
        local_cache_dir()

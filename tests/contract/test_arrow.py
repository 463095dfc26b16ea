"""pyarrow's filesystems as stores: its own ones, and fsspec's behind them."""

from __future__ import annotations

import sys
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import fs as pafs
from tests.contract.servers import AWS_SECRETS, Server, unused_port
from tests.contract.store_contract import StoreContract

from holdfast.errors import AccessDenied, ConfigError, MissingExtra, NotFound, Unavailable
from holdfast.storage.arrow.store import ArrowStore
from holdfast.storage.locate import open_store
from holdfast.storage.store import Entry, Store

RCLONE_DIRECTORIES = "rclone serve s3 loses a file of a directory that is emptied and filled at the same time"


def native(path: str, filesystem: Any) -> Store:
    """The store through pyarrow itself, also where obstore would be used."""
    return ArrowStore(filesystem, path, path)


def s3_filesystem(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    address = server.endpoint.partition("://")[2]
    patience = pafs.AwsStandardS3RetryStrategy(max_attempts=1)
    return pafs.S3FileSystem(endpoint_override=address, scheme="http", region="us-east-1", retry_strategy=patience)


class TestLocal(StoreContract):
    processes_find_it = True

    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Store:
        return open_store(str(tmp_path_factory.mktemp("local") / "runs"), pafs.LocalFileSystem())

    def test_is_read_in_place(self, store: Store) -> None:
        store.put("a/b", b"1")
        assert store.local_root is not None
        assert (store.local_root / "a" / "b").read_bytes() == b"1"


class TestS3Moto(StoreContract):
    secrets = AWS_SECRETS
    supports_exclusive = False
    has_versions = False
    race_rounds = 1
    model_examples = 2
    churn_turns = 3

    @pytest.fixture
    def store(self, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        return native(f"{moto.new_bucket()}/runs", s3_filesystem(moto, monkeypatch))


class TestS3MotoThroughObstore(StoreContract):
    """What users get who pass an ordinary S3FileSystem: exclusive creation included."""

    secrets = AWS_SECRETS
    model_examples = 2
    churn_turns = 3

    @pytest.fixture
    def store(self, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        return open_store(f"{moto.new_bucket()}/runs", s3_filesystem(moto, monkeypatch))


class TestS3RcloneThroughObstore(StoreContract):
    """pyarrow's own way is no way here: the marks that it leaves when it deletes make rclone lose sight of files."""

    supports_exclusive = False
    atomic_overwrite = False
    model_examples = 2

    @pytest.fixture
    def store(self, rclone: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        return open_store(f"{rclone.new_bucket()}/runs", s3_filesystem(rclone, monkeypatch))

    @pytest.mark.skip(RCLONE_DIRECTORIES)
    def test_many_threads_write_and_delete_in_one_directory(self, store: Store) -> None:
        super().test_many_threads_write_and_delete_in_one_directory(store)


class TestFsspecMemory(StoreContract):
    supports_exclusive = False
    has_versions = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        memory, root = fsspec.filesystem("memory"), f"/holdfast-{uuid.uuid4().hex}"
        yield open_store(root, pafs.PyFileSystem(pafs.FSSpecHandler(memory)))
        if memory.exists(root):
            memory.rm(root, recursive=True)


class TestS3fs(StoreContract):
    secrets = AWS_SECRETS
    supports_exclusive = False
    has_versions = False
    race_rounds = 1
    model_examples = 2
    churn_turns = 3

    @pytest.fixture
    def store(self, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        for name, value in moto.environment.items():
            monkeypatch.setenv(name, value)
        s3 = fsspec.filesystem("s3", endpoint_url=moto.endpoint)
        return open_store(f"{moto.new_bucket()}/runs", pafs.PyFileSystem(pafs.FSSpecHandler(s3)))


def memory_store() -> Store:
    return open_store(f"/holdfast-{uuid.uuid4().hex}", fsspec.filesystem("memory"))


def test_an_fsspec_filesystem_is_opened_directly() -> None:
    store = memory_store()
    store.put("a/b", b"1")
    assert store.list() == [Entry("a/b", 1)]
    store.delete(["a/b"])


def test_names_with_compression_suffixes_are_stored_uncompressed(
    moto: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "plain").write_bytes(b"plain")
    bucket = native(moto.new_bucket(), s3_filesystem(moto, monkeypatch))
    for store in (bucket, memory_store()):
        store.upload("x.gz", tmp_path / "plain")
        store.put("y.bz2", b"plain")
        assert store.get("x.gz") == store.get("y.bz2") == b"plain"
        assert store.list() == [Entry("x.gz", 5), Entry("y.bz2", 5)]


def test_delete_treats_glob_characters_literally() -> None:
    store = memory_store()
    for key in ("q?x", "qax", "[a]", "a", "*"):
        store.put(key, b"1")
    store.delete(["q?x", "[a]", "*"])
    assert [entry.key for entry in store.list()] == ["a", "qax"]
    store.delete(["a", "qax"])


def test_a_subtree_of_a_local_filesystem_is_read_in_place(tmp_path: Path) -> None:
    inner = pafs.SubTreeFileSystem(str(tmp_path / "tree"), pafs.LocalFileSystem())
    store = open_store("runs", pafs.SubTreeFileSystem("deeper", inner))
    assert store.local_root == tmp_path / "tree" / "deeper" / "runs"


def test_an_object_that_is_no_filesystem_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage_filesystem is a dict: give a pyarrow\.fs\.FileSystem"):
        open_store("bucket/runs", {})


def test_hdfs_without_hadoop_client_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_HOME", "ARROW_LIBHDFS_DIR", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MissingExtra, match=r"hdfs://127\.0\.0\.1:1/runs needs Hadoop's client.*JAVA_HOME") as caught:
        open_store("hdfs://somebody@127.0.0.1:1/runs")
    assert "somebody" not in str(caught.value)


def test_missing_pyarrow_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("holdfast.storage.arrow")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'holdfast\[arrow\]'"):
        open_store("hdfs://127.0.0.1:1/runs")


def test_missing_bucket_error_names_the_bucket(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = native("no-such-bucket/runs", s3_filesystem(moto, monkeypatch))
    with pytest.raises(NotFound, match="bucket of no-such-bucket/runs/k does not exist: create it"):
        store.put("k", b"1")


@pytest.mark.parametrize("bridge", ["pyarrow", "s3fs"])
def test_wrong_keys_are_refused(rclone: Server, monkeypatch: pytest.MonkeyPatch, bridge: str) -> None:
    access, secret = "another-access-key-00002", "another-secret-key-00002"
    bucket = rclone.new_bucket()
    address = rclone.endpoint.partition("://")[2]
    filesystem = (
        pafs.S3FileSystem(
            access_key=access, secret_key=secret, endpoint_override=address, scheme="http", region="us-east-1"
        )
        if bridge == "pyarrow"
        else fsspec.filesystem("s3", key=access, secret=secret, endpoint_url=rclone.endpoint)
    )
    store = native(f"{bucket}/runs", filesystem) if bridge == "pyarrow" else open_store(f"{bucket}/runs", filesystem)
    for call in (lambda: store.put("k", b"1"), lambda: store.get("k"), store.list):
        with pytest.raises(AccessDenied, match="check the filesystem's credentials") as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value)) + repr(store) + store.uri
        assert access not in shown and secret not in shown


def test_unreachable_server_raises_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with unused_port() as port:
        nobody = pafs.S3FileSystem(
            **{"access_key": "a" * 20, "secret_key": "b" * 20, "scheme": "http", "region": "us-east-1"},
            endpoint_override=f"127.0.0.1:{port}",
            retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=1),
        )
        with pytest.raises(Unavailable, match="bucket/runs/k cannot be reached at the moment"):
            native("bucket/runs", nobody).put("k", b"1")

"""pyarrow's filesystems as stores: its own ones, and fsspec's behind them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from pyarrow import fs as pafs
from tests.contract.servers import Server
from tests.contract.store_contract import StoreContract

from holdfast.storage.locate import open_store
from holdfast.storage.store import Store


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
    supports_exclusive = False
    model_examples = 2

    @pytest.fixture
    def store(self, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        return open_store(f"{moto.new_bucket()}/runs", s3_filesystem(moto, monkeypatch))


class TestS3Rclone(StoreContract):
    supports_exclusive = False
    model_examples = 2

    @pytest.fixture
    def store(self, rclone: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        return open_store(f"{rclone.new_bucket()}/runs", s3_filesystem(rclone, monkeypatch))


class TestFsspecMemory(StoreContract):
    supports_exclusive = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        memory, root = fsspec.filesystem("memory"), f"/holdfast-{uuid.uuid4().hex}"
        yield open_store(root, pafs.PyFileSystem(pafs.FSSpecHandler(memory)))
        if memory.exists(root):
            memory.rm(root, recursive=True)


class TestS3fs(StoreContract):
    supports_exclusive = False
    model_examples = 2

    @pytest.fixture
    def store(self, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        for name, value in moto.environment.items():
            monkeypatch.setenv(name, value)
        s3 = fsspec.filesystem("s3", endpoint_url=moto.endpoint)
        return open_store(f"{moto.new_bucket()}/runs", pafs.PyFileSystem(pafs.FSSpecHandler(s3)))

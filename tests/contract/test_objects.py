"""Object stores against real servers: S3 of both kinds, Azure, Google; and what is said when all is not well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.servers import Server
from tests.contract.store_contract import StoreContract

from holdfast.storage.locate import open_store
from holdfast.storage.store import Store


def opened(server: Server, monkeypatch: pytest.MonkeyPatch, prefix: str = "runs/a b") -> Store:
    """A store in a new bucket of this server, with the server's credentials in the environment."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(server.uri(server.new_bucket(), prefix))


class TestMoto(StoreContract):
    processes_find_it = True
    model_examples = 3

    @pytest.fixture
    def store(self, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        store = opened(moto, monkeypatch)
        yield store
        store.close()


class TestRclone(StoreContract):
    supports_exclusive = False
    processes_find_it = True
    model_examples = 5

    @pytest.fixture
    def store(self, rclone: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        store = opened(rclone, monkeypatch)
        yield store
        store.close()


class TestAzurite(StoreContract):
    processes_find_it = True
    model_examples = 3

    @pytest.fixture
    def store(self, azurite: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        store = opened(azurite, monkeypatch)
        yield store
        store.close()


class TestGoogle(StoreContract):
    processes_find_it = True
    model_examples = 3

    @pytest.fixture
    def store(self, gcs: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        store = opened(gcs, monkeypatch)
        yield store
        store.close()

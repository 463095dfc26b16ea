"""The streamed store, held to the contract over a real socket: plain, and encrypted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store_contract import StoreContract

from holdfast.storage.retry import RetryingStore
from holdfast.storage.store import Store
from holdfast.streaming.client import StreamedStore
from holdfast.streaming.messages import ServedStorage
from holdfast.streaming.server import Settings, StorageServer


def _serve(encrypted: bool) -> Iterator[Store]:
    root = Path(tempfile.mkdtemp(prefix="holdfast-contract-", dir="/dev/shm"))
    directory = str(root / "not made yet")
    server = StorageServer(Settings(root=directory, key="secret", hosts=["127.0.0.1"], encrypted=encrypted))
    served = ServedStorage(root=directory, host="127.0.0.1", port=server.port, key="secret")
    store = RetryingStore(StreamedStore(served, encrypted=encrypted))
    try:
        yield store
    finally:
        store.close()
        server.close()
        shutil.rmtree(root)


class TestStreamed(StoreContract):
    model_examples = 20
    churn_turns = 40

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        yield from _serve(encrypted=False)


class TestStreamedEncrypted(StoreContract):
    model_examples = 5
    churn_turns = 20

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        yield from _serve(encrypted=True)

"""The simulator's store in memory, held to the contract: what `tests/sim` finds is then found on a store."""

from __future__ import annotations

import pytest
from tests.contract.store_contract import StoreContract
from tests.sim.memory_store import Bucket, MemoryStore

from holdfast.storage.store import Store


class TestMemory(StoreContract):
    model_examples = 40

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(Bucket()).sub("root")


class TestMemoryWithoutExclusiveCreation(StoreContract):
    supports_exclusive = False

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(Bucket(exclusive=False)).sub("root")

"""The POSIX store, held to the contract on tmpfs and on the disk that temporary files are on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store_contract import StoreContract

from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Store


class TestDisk(StoreContract):
    processes_find_it = True
    model_examples = 40
    churn_turns = 40

    @pytest.fixture
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
        root = tmp_path_factory.mktemp("disk")
        yield PosixStore(root / "not made yet")
        shutil.rmtree(root)


class TestTmpfs(StoreContract):
    processes_find_it = True
    model_examples = 60
    churn_turns = 300

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        root = Path(tempfile.mkdtemp(prefix="holdfast-contract-", dir="/dev/shm"))
        yield PosixStore(root / "not made yet")
        shutil.rmtree(root)

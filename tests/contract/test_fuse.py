"""The POSIX store on a FUSE mount.

Without rclone's cache of files being written: with it, an overwrite may be read as a mixture of old and new, and a name
that was a directory stays one for a while, whoever asks.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.servers import fuse_mount
from tests.contract.store_contract import StoreContract

from holdfast.storage.locate import open_store
from holdfast.storage.store import Store


@pytest.fixture(scope="session")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mount of a directory, by rclone."""
    parent = tmp_path_factory.mktemp("fuse")
    with fuse_mount(parent / "backing", parent / "mount") as mountpoint:
        yield mountpoint


class TestFuse(StoreContract):
    hides_unfinished = False
    atomic_overwrite = False
    processes_find_it = True
    model_examples = 3

    @pytest.fixture
    def store(self, mount: Path) -> Store:
        return open_store(mount / uuid.uuid4().hex)

"""The POSIX store on a FUSE mount.

Without rclone's cache of files being written: with it, an overwrite may be read as a mixture of old and new, and a name
that was a directory stays one for a while, whoever asks.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from tests.contract.servers import fuse_mount
from tests.contract.store_contract import StoreContract

from holdfast.checkpoint.epochs import epoch_key
from holdfast.control.lease import EpochFile, Lease, acquire
from holdfast.errors import Fenced, RunBusy
from holdfast.storage.locate import open_store
from holdfast.storage.mount_cache import MountCache, find_mount_cache
from holdfast.storage.store import Store


@pytest.fixture(scope="session")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mount of a directory, by rclone."""
    parent = tmp_path_factory.mktemp("fuse")
    with fuse_mount(parent / "backing", parent / "mount") as mountpoint:
        yield mountpoint


@pytest.fixture(scope="session")
def two_mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two mounts of one directory, as two machines have of one bucket, with caches off: for a millisecond, since rclone
    hangs now and then when they are off altogether."""
    parent = tmp_path_factory.mktemp("two")
    with (
        fuse_mount(parent / "backing", parent / "one", cache_time="1ms") as one,
        fuse_mount(parent / "backing", parent / "two", cache_time="1ms") as two,
    ):
        yield one, two


def test_only_one_of_two_mounts_acquires_each_epoch(two_mounts: tuple[Path, Path]) -> None:
    """Exclusive creation of one mount means nothing to the other: its file replaces ours when it is closed."""
    for number in range(15):
        run = f"run {number}"
        barrier = threading.Barrier(2)

        def start(mount: Path, run: str = run, barrier: threading.Barrier = barrier) -> Lease | None:
            store = open_store(mount).sub(run)
            barrier.wait(timeout=60)
            try:
                return acquire(store)
            except (RunBusy, Fenced):
                return None

        with ThreadPoolExecutor(2) as pool:
            found = [lease for lease in pool.map(start, two_mounts) if lease is not None]
        assert [lease.epoch for lease in found] == [1]
        for mount in two_mounts:
            seen = msgspec.json.decode(open_store(mount).sub(run).get(epoch_key(1)), type=EpochFile)
            assert seen.id == found[0].id
        found[0].release()


def test_the_name_cache_time_of_a_mount_is_found(mount: Path, two_mounts: tuple[Path, Path]) -> None:
    assert find_mount_cache(mount) == MountCache("fuse.rclone", 1.0)
    assert find_mount_cache(two_mounts[1] / "not made yet") == MountCache("fuse.rclone", 0.001)


class TestFuse(StoreContract):
    reading_keeps_versions = False  # times change when rclone has closed a file in the backing directory
    hides_unfinished = False
    atomic_overwrite = False
    processes_find_it = True
    model_examples = 3
    race_rounds = 1

    @pytest.fixture
    def store(self, mount: Path) -> Store:
        return open_store(mount / uuid.uuid4().hex)

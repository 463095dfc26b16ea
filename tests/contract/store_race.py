"""The obligations of a store that only concurrent callers can see; inherited by `StoreContract` beside it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, TypeVar

import msgspec
import pytest

from holdfast.checkpoint.claims import create_once
from holdfast.checkpoint.epochs import epoch_key, read_floor
from holdfast.control.lease import EpochFile, Lease, acquire
from holdfast.errors import AlreadyExists, Fenced, NotFound, RunBusy
from holdfast.storage.store import Store

__all__ = ["StoreRaces"]

_T = TypeVar("_T")

THREADS = 8
PROCESSES = 4

_CREATE = """
import sys
from holdfast.errors import AlreadyExists
from holdfast.storage.locate import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    number = line.strip()
    try:
        store.create(f"race/{number}", f"{sys.argv[2]}-{number}".encode())
    except AlreadyExists:
        print("lost", flush=True)
    else:
        print("won", flush=True)
"""

_START = """
import sys
from holdfast.control.lease import acquire
from holdfast.errors import RunBusy
from holdfast.storage.locate import open_store
store = open_store(sys.argv[1])
store.exclusive
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(acquire(store.sub(line.strip())).id, flush=True)
    except RunBusy:
        print("busy", flush=True)
"""

_CHURN = """
import sys
from holdfast.storage.locate import open_store
store = open_store(sys.argv[1])
keys = [f"{directory}/{sys.argv[2]}" for directory in ("a/b/c", "a/b/d", "a/e")]
print("ready", flush=True)
for turn in range(int(sys.stdin.readline())):
    (store.put if turn % 2 else store.create)(keys[0], str(turn).encode())
    store.copy(keys[0], keys[1])
    store.create(keys[2], b"")
    assert store.get(keys[1]) == str(turn).encode()
    store.list()
    store.delete(keys)
print("done", flush=True)
"""


class StoreRaces:
    """Needs the fixture `store`."""

    supports_exclusive: ClassVar[bool] = True
    processes_find_it: ClassVar[bool] = False
    """Whether `open_store(store.uri)` in another process finds the same storage."""
    race_rounds: ClassVar[int] = 2
    """How often many creations of what is written once are tried at the same time."""
    churn_turns: ClassVar[int] = 20
    """How often each process or thread writes and deletes in directories that it shares with others: a few times where
    the storage has no directories."""
    atomic_overwrite: ClassVar[bool] = True
    """False where the kernel caches sizes and pages of what was replaced (FUSE mounts), or the server writes in place
    (rclone): a reader at the very moment of an overwrite may see a mixture there, or less than all, so what is
    overwritten must be sealed."""

    def test_of_many_threads_one_creates(self, store: Store) -> None:
        if not self.supports_exclusive:
            pytest.skip("this storage does not refuse a second creation")
        for number in range(3):
            key = f"race {number}/x"

            def create(token: int, key: str = key) -> bool:
                try:
                    store.create(key, f"token {token}".encode())
                except AlreadyExists:
                    return False
                return True

            won = _at_once([partial(create, token) for token in range(THREADS)])
            assert won.count(True) == 1
            assert store.get(key) == f"token {won.index(True)}".encode()
            assert [entry.key for entry in store.list(f"race {number}")] == [key]

    def test_of_many_processes_one_creates(self, store: Store) -> None:
        if not (self.supports_exclusive and self.processes_find_it):
            pytest.skip("no other process finds this storage, or it does not refuse a second creation")
        with _processes(_CREATE, store.uri) as racers:
            for number in range(10):
                for racer in racers:
                    _tell(racer, str(number))
                outcomes = [_ask(racer) for racer in racers]
                assert sorted(outcomes) == ["lost"] * (PROCESSES - 1) + ["won"]
                assert store.get(f"race/{number}") == f"{outcomes.index('won')}-{number}".encode()

    def test_of_many_threads_one_creates_what_is_written_once(self, store: Store) -> None:
        """Also where the storage refuses no second creation: writers then use claims."""
        for number in range(self.race_rounds):
            key = f"epochs/{number:06d}.json"

            def create(token: int, key: str = key) -> bool:
                return create_once(store, key, f"token {token}".encode())

            won = _at_once([partial(create, token) for token in range(THREADS)])
            assert won.count(True) == 1
            assert store.get(key) == f"token {won.index(True)}".encode()
            assert not create_once(store, key, b"late")
        assert not [entry.key for entry in store.list() if ".claim-" in entry.key]

    def test_of_many_controllers_one_gets_each_epoch(self, store: Store) -> None:
        """Simultaneous starts and takeovers: no two leases have the same epoch, and no epoch's file is overwritten."""
        for number in range(self.race_rounds):
            run = store.sub(f"run {number}")

            def start(run: Store = run, takeover: bool = False) -> Lease | None:
                try:
                    return acquire(run, takeover=takeover)
                except (RunBusy, Fenced):
                    return None

            leases = [lease for lease in _at_once([start] * THREADS) if lease is not None]
            assert [lease.epoch for lease in leases] == [1]
            leases += [lease for lease in _at_once([partial(start, takeover=True)] * THREADS) if lease is not None]
            epochs = [lease.epoch for lease in leases]
            assert len(set(epochs)) == len(epochs) > 1
            for lease in leases:
                assert msgspec.json.decode(run.get(epoch_key(lease.epoch)), type=EpochFile).id == lease.id
                settled = read_floor(run, lease.epoch)
                assert settled is not None and settled.floor == 0
            for lease in leases:
                lease.release()

    def test_of_many_driver_processes_one_gets_each_epoch(self, store: Store) -> None:
        if not self.processes_find_it:
            pytest.skip("no other process finds this storage")
        with _processes(_START, store.uri) as drivers:
            for number in range(self.race_rounds):
                for driver in drivers:
                    _tell(driver, f"run {number}")
                answers = [_ask(driver) for driver in drivers]
                assert len([one for one in answers if one != "busy"]) == 1, answers
                found = msgspec.json.decode(store.get(f"run {number}/{epoch_key(1)}"), type=EpochFile)
                assert found.id in answers

    def test_many_processes_write_and_delete_in_one_directory(self, store: Store) -> None:
        if not self.processes_find_it:
            pytest.skip("no other process finds this storage")
        with _processes(_CHURN, store.uri) as racers:
            for racer in racers:
                _tell(racer, str(self.churn_turns))
            assert [_ask(racer) for racer in racers] == ["done"] * PROCESSES
        assert store.list() == []
        assert store.children() == []

    def test_readers_never_see_a_mixture(self, store: Store) -> None:
        if not self.atomic_overwrite:
            pytest.skip("this storage may mix what is replaced with what replaces it")
        contents = [bytes([65 + number]) * (30_000 + number * 7_000) for number in range(3)]
        store.put("k", contents[0])
        done = threading.Event()

        def write() -> bool:
            try:
                for number in range(30):
                    store.put("k", contents[number % 3])
            finally:
                done.set()
            return True

        def read() -> bool:
            whole = True
            while whole and not done.is_set():
                whole = store.get("k") in contents
            return whole

        assert all(_at_once([write, read, read]))

    def test_many_threads_write_and_delete_in_one_directory(self, store: Store) -> None:
        """Directories that others create and remove meanwhile neither fail a write nor lose one."""

        def churn(number: int) -> bool:
            for turn in range(min(10, self.churn_turns)):
                key = f"shared/deep/{number}"
                (store.put if turn % 2 else store.create)(key, str(turn).encode())
                if store.get(key) != str(turn).encode():
                    return False
                store.list("shared")
                store.delete([key])
            return True

        assert all(_at_once([partial(churn, number) for number in range(THREADS)]))
        with pytest.raises(NotFound):
            store.get("shared/deep/0")
        assert store.list() == []
        assert store.children() == []


def _at_once(actions: list[Callable[[], _T]]) -> list[_T]:
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], _T]) -> _T:
        barrier.wait(timeout=60)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(run, actions))


@contextmanager
def _processes(script: str, uri: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that run `script` with the store's URI and their own number, and wait for a line on stdin."""
    command = [sys.executable, "-c", script, uri]
    racers = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(PROCESSES)
    ]
    try:
        assert [_ask(racer) for racer in racers] == ["ready"] * PROCESSES
        yield racers
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def _tell(racer: subprocess.Popen[str], text: str) -> None:
    assert racer.stdin is not None
    racer.stdin.write(f"{text}\n")
    racer.stdin.flush()


def _ask(racer: subprocess.Popen[str]) -> str:
    assert racer.stdout is not None
    return racer.stdout.readline().strip()

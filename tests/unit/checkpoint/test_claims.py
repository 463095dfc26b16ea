"""Creating a key once on storage without put-if-absent: any order of events, crashed writers, stale claims."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable

import msgspec
import pytest

from holdfast.checkpoint import claims
from holdfast.checkpoint.claims import CLAIM_TIME_TO_LIVE_S, Claim, create_by_claim
from holdfast.checkpoint.process_identity import ProcessIdentity, this_process
from holdfast.errors import AlreadyExists, NotFound
from holdfast.runtime import Runtime, runtime_var
from holdfast.storage.store import Entry

KEY = "epochs/000001.json"
WRITERS = 3


class Crash(BaseException):
    """The writer is gone: it does nothing more, its `finally` blocks included."""


class Turns:
    """Runs one thread at a time; at each step a seeded choice decides which one continues."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._changed = threading.Condition()
        self._alive: list[int] = []
        self._current = -1

    def run(self, actions: list[Callable[[], None]]) -> None:
        def main(me: int, action: Callable[[], None]) -> None:
            self._wait(me)
            try:
                action()
            except Crash:
                pass
            finally:
                with self._changed:
                    self._alive.remove(me)
                    self._choose()

        self._alive = list(range(len(actions)))
        threads = [threading.Thread(target=main, args=one, name=str(one[0])) for one in enumerate(actions)]
        for thread in threads:
            thread.start()
        with self._changed:
            self._choose()
        for thread in threads:
            thread.join()

    def step(self, took_s: float = 0.01) -> None:
        with self._changed:
            self.now_s += took_s
            self._choose()
        self._wait(int(threading.current_thread().name))

    def _choose(self) -> None:
        self._current = self.random.choice(self._alive) if self._alive else -1
        self._changed.notify_all()

    def _wait(self, me: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._current == me)


class SteppedRuntime(Runtime):
    """A writer whose clock, pauses and random numbers are those of `Turns`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def monotonic(self) -> float:
        return self._turns.now_s

    def sleep(self, seconds: float) -> None:
        self._turns.step(seconds)

    def uniform(self, low: float, high: float) -> float:
        return self._turns.random.uniform(low, high)

    def token_hex(self, size_bytes: int) -> str:
        return f"{self._turns.random.getrandbits(8 * size_bytes):0{2 * size_bytes}x}"


class SteppedStore:
    """One writer's view of a store that refuses no creation. Each verb is one step, and `list` and `create` are two, as
    on a real server: a listing is no instant. After `steps_left` steps the writer has crashed."""

    uri = "memory"
    exclusive = False

    def __init__(self, files: dict[str, bytes], turns: Turns, steps_left: int = 10**9) -> None:
        self._files = files
        self._turns = turns
        self._steps_left = steps_left

    def put(self, key: str, data: bytes) -> None:
        self._step()
        self._files[key] = data
        self._step()

    def create(self, key: str, data: bytes) -> None:
        self._step()
        if key in self._files:
            raise AlreadyExists(key)
        self.put(key, data)

    def get(self, key: str) -> bytes:
        self._step()
        if key not in self._files:
            raise NotFound(key)
        return self._files[key]

    def list(self, prefix: str = "") -> list[Entry]:
        self._step()
        middle = f"{prefix}/{self._turns.random.choice('./0z')}"
        first = [key for key in self._files if key < middle]
        self._step()
        return [Entry(key, 1) for key in sorted({*first, *(key for key in self._files if key >= middle)})]

    def delete(self, keys: Iterable[str]) -> None:
        self._step()
        for key in keys:
            self._files.pop(key, None)

    def _step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise Crash
        self._turns.step()


def race(seed: int, crashing: int = 0) -> tuple[list[bool | None], dict[str, bytes]]:
    """Let writers create one key; returns each outcome (None: it crashed), and what is stored afterwards."""
    turns = Turns(seed)
    files: dict[str, bytes] = {}
    told: list[bool | None] = [None] * WRITERS

    def writer(number: int) -> None:
        crashes = turns.random.randrange(1, 14) if number < crashing else 10**9
        store = SteppedStore(files, turns, crashes)
        runtime_var.set(SteppedRuntime(turns))
        told[number] = create_by_claim(store, KEY, str(number).encode())  # type: ignore[arg-type]

    turns.run([lambda number=number: writer(number) for number in range(WRITERS)])  # type: ignore[misc]
    return told, files


def test_exactly_one_writer_creates_in_any_order_of_events() -> None:
    for seed in range(300):
        told, files = race(seed)
        assert sorted(told, key=bool) == [False] * (WRITERS - 1) + [True], seed
        assert files == {KEY: str(told.index(True)).encode()}, seed


def test_writers_that_crash_at_any_step_neither_block_the_others_nor_let_two_win() -> None:
    for seed in range(150):
        told, files = race(seed, crashing=WRITERS - 1)
        survivor = told[-1]
        assert survivor is not None, seed
        assert told.count(True) <= 1, seed
        winner = told.index(True) if True in told else int(files[KEY])
        assert files[KEY] == str(winner).encode(), seed
        assert survivor == (winner == WRITERS - 1), seed


def claimed(writer: ProcessIdentity) -> dict[str, bytes]:
    claim = Claim(key=KEY, token="00", writer=writer)
    return {"epochs/.claim-keep": b"", "epochs/.claim-000001.json-00.json": msgspec.json.encode(claim)}


@pytest.mark.parametrize(
    ("writer", "waits_s"),
    [
        (msgspec.structs.replace(this_process(), started_ticks=1), claims._TRUSTED_S),
        (ProcessIdentity(host="elsewhere", pid=1), CLAIM_TIME_TO_LIVE_S),
    ],
    ids=["certainly dead", "unknown"],
)
def test_a_claim_of_a_dead_writer_does_not_count(writer: ProcessIdentity, waits_s: float) -> None:
    turns, files, told = Turns(0), claimed(writer), list[bool]()

    def create() -> None:
        store = SteppedStore(files, turns)
        runtime_var.set(SteppedRuntime(turns))
        told.append(create_by_claim(store, KEY, b"1"))  # type: ignore[arg-type]

    turns.run([create])
    assert told == [True]
    assert files == {KEY: b"1", "epochs/.claim-keep": b""}
    assert waits_s <= turns.now_s < waits_s + 10


def test_the_name_cache_time_is_waited_between_claim_and_listing() -> None:
    """On a mount that caches names, a claim counts only once the others cannot miss it any more."""
    turns, files, pauses = Turns(0), dict[str, bytes](), list[float]()

    class Sleeper(SteppedRuntime):
        def sleep(self, seconds: float) -> None:
            pauses.append(seconds if any(".claim-" in key for key in files) else -seconds)

    def create() -> None:
        store = SteppedStore(files, turns)
        runtime_var.set(Sleeper(turns))
        create_by_claim(store, KEY, b"1", cache_s=3.0)  # type: ignore[arg-type]

    turns.run([create])
    assert pauses == [3.0] and files[KEY] == b"1"

"""Retries: bounded, with growing random pauses, and never blind after a lost answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import AccessDenied, AlreadyExists, NotFound, Unavailable
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.retry import RetryingStore
from holdfast.storage.store import Digest, Entry, OnBytes, Source, Store

_T = TypeVar("_T")

OK, FAIL, LOSE, DENY = "works", "fails before it took place", "took place, but the answer is lost", "is denied"


class FlakyStore:
    """A real store with faults: `script` says how each call ends, in turn; afterwards all of them succeed."""

    def __init__(self, store: Store, script: Iterable[str] = ()) -> None:
        self.store, self.script, self.calls, self.closed = store, list(script), list[str](), False

    def _call(self, name: str, action: Callable[[], _T]) -> _T:
        self.calls.append(name)
        step = self.script.pop(0) if self.script else OK
        if step == FAIL:
            raise Unavailable(f"{name}: no answer.")
        if step == DENY:
            raise AccessDenied(f"{name}: denied.")
        answer = action()
        if step == LOSE:
            raise Unavailable(f"{name}: the line broke.")
        return answer

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def local_root(self) -> Path | None:
        return self.store.local_root

    @property
    def exclusive(self) -> bool:
        return self._call("exclusive", lambda: self.store.exclusive)

    def put(self, key: str, data: bytes) -> None:
        self._call("put", lambda: self.store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        self._call("create", lambda: self.store.create(key, data))

    def get(self, key: str) -> bytes:
        return self._call("get", lambda: self.store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._call("get_range", lambda: self.store.get_range(key, start, length))

    def size(self, key: str) -> int:
        return self._call("size", lambda: self.store.size(key))

    def version(self, key: str) -> str | None:
        return self._call("version", lambda: self.store.version(key))

    def children(self, prefix: str = "") -> list[str]:
        return self._call("children", lambda: self.store.children(prefix))

    def list(self, prefix: str = "") -> list[Entry]:
        return self._call("list", lambda: self.store.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self._call("delete", lambda: self.store.delete(keys))

    def copy(self, source: str, target: str) -> None:
        self._call("copy", lambda: self.store.copy(source, target))

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        return self._call("upload", lambda: self.store.upload(key, source, on_bytes))

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        return self._call("download", lambda: self.store.download(key, target, on_bytes))

    def sub(self, prefix: str) -> FlakyStore:
        return FlakyStore(self.store.sub(prefix), self.script)

    def close(self) -> None:
        self.closed = True


class Bench:
    """A patient store over a flaky one over a directory, with a clock that only notes the pauses."""

    def __init__(self, root: Path, script: Iterable[str], attempts: int = 4) -> None:
        self.real = PosixStore(root)
        self.flaky = FlakyStore(self.real, script)
        self.pauses: list[float] = []
        self.bounds: list[float] = []
        self.store = RetryingStore(
            self.flaky, attempts, base_delay_s=1.0, max_delay_s=5.0, sleep=self.pauses.append, uniform=self._uniform
        )

    def _uniform(self, low: float, high: float) -> float:
        assert low == 0
        self.bounds.append(high)
        return high / 2


def test_a_retrying_store_is_a_store(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [])
    assert isinstance(bench.store, Store)
    assert bench.store.uri == str(tmp_path)
    assert bench.store.local_root == tmp_path
    bench.store.close()
    assert bench.flaky.closed


def test_pauses_grow_and_are_bounded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [FAIL] * 5, attempts=6)
    bench.store.put("k", b"1")
    assert bench.real.get("k") == b"1"
    assert bench.bounds == [1, 2, 4, 5, 5]
    assert bench.pauses == [0.5, 1, 2, 2.5, 2.5]


def test_the_error_after_giving_up_names_the_number_of_tries(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [FAIL] * 9)
    with pytest.raises(Unavailable, match=r"put: no answer.*4 tries"):
        bench.store.put("k", b"1")
    assert bench.flaky.calls == ["put"] * 4
    assert len(bench.pauses) == 3
    assert bench.real.list() == []


def test_only_unavailable_is_retried(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [FAIL, DENY])
    with pytest.raises(AccessDenied):
        bench.store.put("k", b"1")
    with pytest.raises(NotFound):
        bench.store.get("absent")
    assert bench.flaky.calls == ["put", "put", "get"]


def test_every_operation_is_retried(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"123")
    bench = Bench(tmp_path / "root", [])
    store = bench.store
    verbs: list[tuple[Callable[[], object], object]] = [
        (lambda: store.put("d/k", b"0123"), None),
        (lambda: store.get("d/k"), b"0123"),
        (lambda: store.get_range("d/k", 1, 2), b"12"),
        (lambda: store.size("d/k"), 4),
        (store.children, ["d"]),
        (store.list, [Entry("d/k", 4)]),
        (lambda: store.copy("d/k", "d/c"), None),
        (lambda: store.upload("d/u", source).size_bytes, 3),
        (lambda: store.download("d/u", tmp_path / "target").size_bytes, 3),
        (lambda: store.exclusive, True),
        (lambda: store.delete(key for key in ("d/k", "d/c", "d/u")), None),
        (store.list, []),
    ]
    for verb, expected in verbs:
        bench.flaky.script[:] = [FAIL, LOSE]
        assert verb() == expected
        assert bench.flaky.script == []


def test_operations_of_a_sub_store_are_retried(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [FAIL, FAIL])
    bench.store.sub("a").put("k", b"1")
    assert bench.real.list() == [Entry("a/k", 1)]
    assert len(bench.pauses) == 2


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        ([OK], ["create"]),
        ([FAIL], ["create", "get", "create"]),
        ([LOSE], ["create", "get"]),
        ([LOSE, FAIL, OK], ["create", "get", "get"]),
        ([FAIL, OK, LOSE], ["create", "get", "create", "get"]),
        ([FAIL, OK, FAIL, OK], ["create", "get", "create", "get", "create"]),
    ],
)
def test_a_create_with_a_lost_answer_is_decided_by_reading_back(
    tmp_path: Path, script: list[str], calls: list[str]
) -> None:
    bench = Bench(tmp_path, script)
    bench.store.create("k", b"token 1")
    assert bench.real.get("k") == b"token 1"
    assert bench.flaky.calls == calls


def test_a_retried_create_does_not_claim_anothers_object(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [FAIL])
    bench.real.create("k", b"token 2")
    with pytest.raises(AlreadyExists):
        bench.store.create("k", b"token 1")
    bench.flaky.script[:] = []
    with pytest.raises(AlreadyExists):
        bench.store.create("k", b"token 2")  # equal bytes prove nothing where no answer was lost
    assert bench.real.get("k") == b"token 2"


def test_a_delayed_create_that_succeeds_after_reading_back_is_ours(tmp_path: Path) -> None:
    """The first request arrives only after the reading back: the second one's refusal is settled as well."""
    bench = Bench(tmp_path, [FAIL])
    flaky, pending = bench.flaky, [True]
    really = flaky.store.create

    class Late(PosixStore):
        def create(self, key: str, data: bytes) -> None:
            if pending:
                pending.clear()
                really(key, data)
            super().create(key, data)

    flaky.store = Late(tmp_path)
    bench.store.create("k", b"token 1")
    assert bench.real.get("k") == b"token 1"
    assert flaky.calls == ["create", "get", "create", "get"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(script=st.lists(st.sampled_from([OK, FAIL, LOSE]), max_size=8), rival=st.booleans())
def test_create_returns_or_raises_according_to_whose_bytes_are_stored(
    tmp_path: Path, script: list[str], rival: bool
) -> None:
    """Success means that our bytes are there; AlreadyExists, that another's are."""
    bench = Bench(tmp_path, script)
    bench.real.delete(["k"])
    if rival:
        bench.real.create("k", b"theirs")
    try:
        bench.store.create("k", b"ours")
    except AlreadyExists:
        assert rival
        assert bench.real.get("k") == b"theirs"
    except Unavailable:
        assert bench.flaky.script or len(script) >= 4
    else:
        assert not rival
        assert bench.real.get("k") == b"ours"


def test_progress_counts_each_byte_once(tmp_path: Path) -> None:
    source, told = tmp_path / "source", list[int]()
    source.write_bytes(bytes(3_000_000))
    bench = Bench(tmp_path / "root", [LOSE, FAIL, LOSE])
    assert bench.store.upload("k", source, told.append).size_bytes == 3_000_000
    assert sum(told) == 3_000_000
    told.clear()
    bench.flaky.script[:] = [LOSE]
    bench.store.download("k", tmp_path / "target", told.append)
    assert sum(told) == 3_000_000
    assert 0 in told, "a repeated transfer still asks whether to go on"

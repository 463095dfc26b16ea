"""What every rendezvous must do (`holdfast.rendezvous.rendezvous`), held to a real etcd and to a directory."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.contract.etcd_server import EtcdServer

from holdfast.rendezvous.rendezvous import Rendezvous, SessionExpiredError
from holdfast.rendezvous.session import Session
from holdfast.rendezvous.uri import open_rendezvous, parse_rendezvous_uri

pytestmark = pytest.mark.timeout(120)

_LONG_S = 60.0
Connect = Callable[[], Rendezvous]


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd") / "data").start()
    yield server
    server.kill()


@pytest.fixture(params=["etcd", "directory"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Opens the same rendezvous as another host would."""
    if request.param == "etcd":
        uri = f"etcd://{request.getfixturevalue('etcd').address}/{uuid.uuid4().hex}"
    else:
        uri = f"file://{tmp_path}/shared"
    opened: list[Rendezvous] = []

    def open_one() -> Rendezvous:
        opened.append(open_rendezvous(parse_rendezvous_uri(uri)))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_what_one_host_puts_others_get(connect: Connect) -> None:
    one, other = connect(), connect()
    assert other.get("a/b") is None and other.list() == {}
    one.put("a/b", b"1")
    one.put("a/c", b"\x00\xff")
    one.put("other", b"")
    assert other.get("a/b") == b"1"
    assert other.list("a/") == {"a/b": b"1", "a/c": b"\x00\xff"}
    assert other.list() == {"a/b": b"1", "a/c": b"\x00\xff", "other": b""}
    one.put("a/b", b"2")
    other.delete("a/c")
    other.delete("never was")
    assert one.list("a/") == {"a/b": b"2"}


def test_only_one_of_many_hosts_creates_a_key(connect: Connect) -> None:
    hosts = [connect() for _ in range(8)]
    for attempt in range(5):
        won: list[int] = []
        start = threading.Barrier(len(hosts))

        def create(
            number: int, start: threading.Barrier = start, won: list[int] = won, key: str = f"k{attempt}"
        ) -> None:
            start.wait()
            if hosts[number].create(key, str(number).encode()):
                won.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(len(hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert hosts[0].get(f"k{attempt}") == str(won[0]).encode()


def test_a_key_can_be_created_again_after_it_was_deleted(connect: Connect) -> None:
    one, other = connect(), connect()
    for _ in range(3):
        assert one.create("k", b"1")
        assert not other.create("k", b"2")
        other.delete("k")


def test_creating_the_same_value_again_is_told_as_success(connect: Connect) -> None:
    """The answer to the first request may have been lost."""
    one = connect()
    session = one.open_session(_LONG_S)
    assert one.create("k", b"mine", session)
    assert one.create("k", b"mine", session)
    assert not one.create("k", b"mine")


def test_keys_of_a_session_go_with_it_and_others_stay(connect: Connect) -> None:
    one, other = connect(), connect()
    session = one.open_session(_LONG_S)
    one.put("host", b"1", session)
    assert one.create("leader", b"1", session)
    one.put("stays", b"1")
    assert not other.create("leader", b"2")
    assert one.renew(session)
    one.end_session(session)
    assert other.list() == {"stays": b"1"}
    assert other.create("leader", b"2")
    assert not one.renew(session)
    with pytest.raises(SessionExpiredError):
        one.put("host", b"1", session)
    with pytest.raises(SessionExpiredError):
        one.create("other", b"1", session)


def test_a_key_that_was_put_without_a_session_outlives_the_one_it_had(connect: Connect) -> None:
    one = connect()
    session = one.open_session(_LONG_S)
    one.put("k", b"1", session)
    one.put("k", b"2")
    one.end_session(session)
    assert one.get("k") == b"2"


def test_a_session_that_is_not_renewed_ends_by_itself(connect: Connect) -> None:
    one, other = connect(), connect()
    session = one.open_session(2.0)
    one.put("host", b"1", session)
    lasting = Session(other, 2.0)
    lasting.register("lasting", b"1")
    watch = other.watch()
    try:
        entries = watch.wait(None, _LONG_S)
        while "host" in entries:
            entries = watch.wait(entries, _LONG_S)
        assert entries == {"lasting": b"1"}
    finally:
        watch.close()
        lasting.close()
    assert not one.renew(session)
    assert other.list() == {}, "the other session ended when it was closed"


def test_a_watch_sees_every_kind_of_change_below_its_prefix(connect: Connect) -> None:
    one, other = connect(), connect()
    one.put("a/x", b"0")
    watch = other.watch("a/")
    seen = watch.wait(None, _LONG_S)
    assert seen == {"a/x": b"0"}
    session = one.open_session(_LONG_S)
    changes: list[tuple[Callable[[], None], dict[str, bytes]]] = [
        (lambda: one.put("a/x", b"1"), {"a/x": b"1"}),
        (lambda: one.put("a/y", b"2", session), {"a/x": b"1", "a/y": b"2"}),
        (lambda: one.delete("a/x"), {"a/y": b"2"}),
        (lambda: one.end_session(session), {}),
    ]
    for change, expected in changes:
        change()
        seen = watch.wait(seen, _LONG_S)
        assert seen == expected
    one.put("b", b"elsewhere")
    assert watch.wait(seen, 0.3) == seen
    watch.close()
    assert watch.wait(seen, _LONG_S) == seen, "a closed watch does not wait"


def test_a_session_that_was_given_up_is_opened_anew_with_its_keys(connect: Connect) -> None:
    one, other = connect(), connect()
    reopened = threading.Event()
    session = Session(one, 2.0, reopened.set)
    session.register("host", b"1")
    before = session.id
    other.end_session(before)
    assert other.get("host") is None
    assert reopened.wait(_LONG_S)
    assert session.id != before
    assert other.get("host") == b"1"
    session.close()
    assert other.get("host") is None


def test_a_session_is_renewed_for_longer_than_its_time_to_live(connect: Connect) -> None:
    one, other = connect(), connect()
    lost = threading.Event()
    session = Session(one, 1.0, lost.set)
    session.register("host", b"1")
    watch = other.watch()
    entries = watch.wait(None, _LONG_S)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        entries = watch.wait(entries, 0.2)
        if lost.is_set():
            break  # this machine stood still; what matters is that it was said
        assert entries in ({"host": b"1"}, {}), entries
    assert lost.is_set() or other.get("host") == b"1"
    watch.close()
    session.close()

"""What a directory alone must get right: no trust in clocks or file times, one winner per version, private files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.rendezvous import directory as module
from holdfast.rendezvous.directory import DirectoryRendezvous
from holdfast.rendezvous.session import Session
from holdfast.runtime import Runtime, runtime_var


class _Clock(Runtime):
    """The observer's monotonic clock stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Iterator[_Clock]:
    made = _Clock()
    before = runtime_var.set(made)
    yield made
    runtime_var.reset(before)


def _look(observer: DirectoryRendezvous, clock: _Clock, times: int, every_s: float) -> bool:
    """Whether the key `host` is there after so many looks."""
    for _ in range(times):
        observer.list()
        clock.now_s += every_s
    return "host" in observer.list()


def test_file_times_of_another_century_end_no_session(tmp_path: Path, clock: _Clock) -> None:
    owner, observer = DirectoryRendezvous(tmp_path), DirectoryRendezvous(tmp_path)
    session = owner.open_session(10.0)
    owner.put("host", b"1", session)
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    assert _look(observer, clock, 9, 1.0)
    assert owner.renew(session)
    for path in tmp_path.rglob("*"):
        os.utime(path, (2**32, 2**32))
    assert _look(observer, clock, 9, 1.0), "silence is counted from the last change"
    assert not _look(observer, clock, 2, 1.0)
    assert not owner.renew(session)


def test_an_observer_that_stood_still_gives_owners_time_to_show_that_they_live(tmp_path: Path, clock: _Clock) -> None:
    owner, observer = DirectoryRendezvous(tmp_path), DirectoryRendezvous(tmp_path)
    session = owner.open_session(10.0)
    owner.put("host", b"1", session)
    observer.list()
    clock.now_s += 3600.0
    assert "host" in observer.list()
    assert owner.renew(session)
    assert "host" in observer.list()


def test_all_observers_agree_that_a_session_is_over(tmp_path: Path, clock: _Clock) -> None:
    owner, first, second = (DirectoryRendezvous(tmp_path) for _ in range(3))
    session = owner.open_session(10.0)
    owner.put("host", b"1", session)
    second.list()
    assert not _look(first, clock, 12, 1.0)
    assert second.list() == {} and owner.list() == {}, "one has found it silent, so it is over for everybody"


def test_a_stale_view_creates_nothing(tmp_path: Path) -> None:
    """A host that read a version long ago finds the next one free, for it was superseded and removed meanwhile."""
    slow, quick = DirectoryRendezvous(tmp_path), DirectoryRendezvous(tmp_path)
    quick.put("k", b"1")
    quick.delete("k")
    quick.put("k", b"3")
    quick.put("k", b"4")
    assert not slow._write("k", 3, module._Record(value=b"stale"))
    assert slow.get("k") == b"4"
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["k@00000004"]


def test_files_are_private_and_few(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        shared = tmp_path / "shared"
        shared.mkdir(mode=0o755)
        one = DirectoryRendezvous(shared)
        session = one.open_session(10.0)
        for number in range(5):
            one.put("token", str(number).encode(), session)
            one.renew(session)
    finally:
        os.umask(before)
    assert shared.stat().st_mode & 0o777 == 0o755, "the directory that the user has made is left as it is"
    files = [path for path in shared.rglob("*") if path.is_file()]
    assert len(files) == 3, "the key, the session, and what says what the directory is"
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_concurrent_writers_of_one_key_leave_one_file(tmp_path: Path) -> None:
    hosts = [DirectoryRendezvous(tmp_path) for _ in range(4)]

    def write(host: DirectoryRendezvous) -> None:
        for number in range(20):
            host.put("k", str(number).encode())

    threads = [threading.Thread(target=write, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hosts[0].get("k") == b"19"
    assert len(list((tmp_path / "keys").iterdir())) == 1


def test_hosts_that_died_long_ago_are_not_there_for_one_that_comes(tmp_path: Path) -> None:
    dead = DirectoryRendezvous(tmp_path)
    session = dead.open_session(1.0)
    dead.put("host", b"1", session)
    os.utime(tmp_path / "sessions" / session, (0, 0))
    comer = DirectoryRendezvous(tmp_path)
    comer.open_session(1.0)
    assert comer.list() == {}
    assert not dead.renew(session)


def test_a_host_whose_clock_is_wrong_is_there_for_one_that_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = DirectoryRendezvous(tmp_path)
    write_beat = owner._write_beat

    def write_old_beat(session: str, beat: module._Beat) -> None:
        write_beat(session, beat)
        os.utime(tmp_path / "sessions" / session, (0, 0))

    monkeypatch.setattr(owner, "_write_beat", write_old_beat)
    session = Session(owner, 1.5)
    session.register("host", b"1")
    comer = DirectoryRendezvous(tmp_path)
    try:
        comer.open_session(1.5)
        assert comer.list() == {"host": b"1"}
        assert owner.renew(session.id)
    finally:
        session.close()


def test_a_file_that_another_host_replaces_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, observer = DirectoryRendezvous(tmp_path), DirectoryRendezvous(tmp_path)
    session = owner.open_session(60.0)
    owner.put("host", b"1", session)
    read_bytes, stale = Path.read_bytes, {"host@00000001", session}

    def read_stale_once(path: Path) -> bytes:
        if path.name in stale:
            stale.remove(path.name)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read_stale_once)
    assert observer.list() == {"host": b"1"}
    assert not stale

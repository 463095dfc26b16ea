"""An agent's directory on a cache that several machines share, where locks may hold on one of them only."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from holdfast.agent import process_directory
from holdfast.agent.process_directory import sweep_dead
from holdfast.agent.session_dir import SessionDir


class Machines:
    """Lets this process stand in for several machines: each has a name, and sees no lock of the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(process_directory, "has_shared_locks", lambda directory: False)

    def become(self, name: str) -> None:
        self._monkeypatch.setattr(process_directory, "machine_id", lambda: name)

    @staticmethod
    def unsee_lock(session: SessionDir) -> None:
        """What the other machines see of a lock that holds on one machine only: nothing."""
        os.close(session._directory._lock)
        session._directory._lock = os.open(os.devnull, os.O_RDONLY)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(monkeypatch)


def test_session_directories_of_other_machines_are_not_removed(machines: Machines, tmp_path: Path) -> None:
    """Process ids repeat between machines, and so do the names of their agents."""
    machines.become("first")
    theirs = SessionDir("local-4242-0", tmp_path)
    staging = theirs.run("r").staging(1)
    staging.mkdir(parents=True)
    (staging / "weights").write_text("not uploaded yet")
    machines.unsee_lock(theirs)
    machines.become("second")
    mine = SessionDir("local-4242-0", tmp_path)
    assert mine.path != theirs.path
    assert sweep_dead(tmp_path / "agents") == []
    assert (staging / "weights").read_text() == "not uploaded yet"
    mine.remove()
    theirs.remove()
    assert list((tmp_path / "agents").iterdir()) == []


def test_session_directories_of_dead_local_agents_are_removed(machines: Machines, tmp_path: Path) -> None:
    machines.become("first")
    dead = SessionDir("a1", tmp_path)
    machines.unsee_lock(dead)  # its process is gone
    machines.become("second")
    assert sweep_dead(tmp_path / "agents") == []
    machines.become("first")
    assert sweep_dead(tmp_path / "agents") == ["a1@first"]
    assert list((tmp_path / "agents").iterdir()) == []
    dead.remove()


def test_session_directories_without_a_heartbeat_for_a_week_are_removed(machines: Machines, tmp_path: Path) -> None:
    machines.become("first")
    forgotten, renewed = SessionDir("a1", tmp_path), SessionDir("a2", tmp_path)
    old = time.time() - 8 * 86_400
    for session in (forgotten, renewed):
        for path in (session.path, session.lock_path):
            os.utime(path, (old, old))
    renewed.renew_times()
    for session in (forgotten, renewed):
        machines.unsee_lock(session)
    machines.become("second")
    assert sweep_dead(tmp_path / "agents") == ["a1@first"]
    assert renewed.path.exists()
    renewed.remove()
    forgotten.remove()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_session_directories_are_private(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        session = SessionDir("a1", tmp_path / "cache")
        run = session.run("r")
        made = [run.temporary(1), run.error_file(1, 0).parent]
        folders = [tmp_path / "cache", *(path for path in (tmp_path / "cache").rglob("*") if path.is_dir())]
        assert len(folders) >= len(made) + 2
        assert {str(path): oct(path.stat().st_mode & 0o777) for path in folders if path.stat().st_mode & 0o077} == {}
        session.remove()
    finally:
        os.umask(before)


def test_an_empty_directory_of_ended_workers_is_anothers_next_and_a_full_one_is_removed(tmp_path: Path) -> None:
    session = SessionDir("a1", tmp_path / "cache")
    run, other = session.run("r"), session.run("other")
    empty, full = run.temporary(1), run.temporary(2)
    assert run.temporary(1) == empty != full
    (full / "left").touch()
    assert run.drop_temporary(1)
    assert other.temporary(1) == empty
    assert other.temporary(2) not in (empty, full)
    assert not run.drop_temporary(2)
    run.remove_temporary(2)
    assert not full.exists()
    session.remove()


def test_session_directories_work_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    session = SessionDir("a1", tmp_path)
    with pytest.raises(FileExistsError, match="Another agent a1"):
        SessionDir("a1", tmp_path)
    assert session.path.exists()
    session.remove()

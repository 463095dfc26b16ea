"""The lease: at most one controller counts; a second one is refused, waits, or fences the first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.epochs import EpochFloor, epoch_key, read_floor
from holdfast.checkpoint.process_identity import ProcessIdentity
from holdfast.control.lease import TIME_TO_LIVE_S, EpochFile, _settle, acquire, read_cuts
from holdfast.errors import Fenced, RunBusy
from holdfast.journal.reader import Position
from holdfast.storage.posix.store import PosixStore


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "run")


def test_a_second_acquire_is_refused_naming_the_holder(store: PosixStore) -> None:
    first = acquire(store)
    assert first.epoch == 1
    with pytest.raises(RunBusy, match=r"held by process \d+ on .+ since 20.+takeover=True"):
        acquire(store)


def test_a_released_lease_is_free_at_once(store: PosixStore) -> None:
    acquire(store).release()
    assert acquire(store).epoch == 2


def test_each_lease_has_a_random_id_that_its_epoch_file_holds(store: PosixStore) -> None:
    first, second = acquire(store), acquire(store, takeover=True)
    assert first.id != second.id
    for lease in (first, second):
        assert re.fullmatch("[0-9a-f]{16}", lease.id)
        assert msgspec.json.decode(store.get(epoch_key(lease.epoch)), type=EpochFile).id == lease.id


def test_takeover_fences_the_first_lease(store: PosixStore) -> None:
    first = acquire(store)
    second = acquire(store, takeover=True)
    assert second.epoch == 2
    with pytest.raises(Fenced, match="taken over"):
        first.beat()
    second.beat()


def test_the_lease_of_a_dead_local_process_is_free(store: PosixStore) -> None:
    program = (
        "import sys; from pathlib import Path; from holdfast.control.lease import acquire;"
        "from holdfast.storage.posix.store import PosixStore; acquire(PosixStore(Path(sys.argv[1])))"
    )
    subprocess.run([sys.executable, "-c", program, store.uri], check=True)
    assert acquire(store).epoch == 2


def test_a_holder_on_another_machine_is_alive_while_its_heartbeat_changes(store: PosixStore) -> None:
    """Its process cannot be checked from here: it counts as dead when its heartbeat does not change for the time to
    live."""
    lease = acquire(store)
    away = EpochFile(epoch=1, holder=ProcessIdentity(host="elsewhere", pid=1), started_at="2026-01-01T00:00:00Z")
    store.put("epochs/000001.json", msgspec.json.encode(away))
    pauses: list[float] = []

    def sleep_while_it_beats(pause_s: float) -> None:
        pauses.append(pause_s)
        lease._put(released=False)
        lease._number += 1

    with pytest.raises(RunBusy, match="process 1 on elsewhere"):
        acquire(store, sleep=sleep_while_it_beats)
    pauses.clear()
    assert acquire(store, sleep=pauses.append).epoch == 2
    assert sum(pauses) >= away.time_to_live_s


def test_floor_and_journal_end_are_written_after_the_epoch_file(store: PosixStore, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    commit_directory(store, tmp_path / "files")
    lease = acquire(store)
    assert lease.floor == 1
    assert read_floor(store, 1) == EpochFloor(epoch=1, floor=1)
    assert read_cuts(store) == [(1, Position())]


def test_a_controller_fenced_before_it_wrote_its_floor_voids_nothing(store: PosixStore, tmp_path: Path) -> None:
    """B takes over and stalls; C takes over and commits; B continues, and must notice that it was fenced."""
    (tmp_path / "files").mkdir()
    acquire(store)
    stalled = EpochFile(epoch=2, holder=ProcessIdentity(host="elsewhere", pid=1), started_at="2026-01-01T00:00:00Z")
    store.create(epoch_key(2), msgspec.json.encode(stalled))
    third = acquire(store, takeover=True)
    done = commit_directory(store, tmp_path / "files")
    assert (third.epoch, done.epoch) == (3, 3)
    with pytest.raises(Fenced, match="taken over"):
        _settle(store, 2)
    assert Catalog(store).committed() == [done]


def test_a_controller_whose_epoch_file_names_another_is_fenced(store: PosixStore) -> None:
    """Where files are seen late, two may create the same epoch: whoever's file is there in the end has it."""
    first, second = acquire(store), acquire(store, takeover=True)
    theirs = msgspec.json.decode(store.get(epoch_key(second.epoch)), type=EpochFile)
    store.put(epoch_key(first.epoch), msgspec.json.encode(msgspec.structs.replace(theirs, epoch=first.epoch)))
    store.delete([epoch_key(second.epoch)])
    with pytest.raises(Fenced, match="taken over"):
        first.beat()


def test_an_epoch_file_that_stays_torn_holds_no_lease(store: PosixStore) -> None:
    store.put(epoch_key(1), b'{"epoch": 1, "hol')
    pauses: list[float] = []
    assert acquire(store, sleep=pauses.append).epoch == 2
    assert sum(pauses) >= TIME_TO_LIVE_S


def test_an_epoch_file_that_is_just_being_written_is_waited_for(store: PosixStore) -> None:
    """Where creation is not atomic, others see the file before its controller has written it."""
    first = acquire(store)
    whole = store.get(epoch_key(first.epoch))
    store.put(epoch_key(first.epoch), b"")
    with pytest.raises(RunBusy, match="held by process"):
        acquire(store, sleep=lambda _: store.put(epoch_key(first.epoch), whole))
    first.beat()


def test_a_takeover_waits_for_no_torn_epoch_file(store: PosixStore) -> None:
    store.put(epoch_key(1), b"")
    pauses: list[float] = []
    assert acquire(store, sleep=pauses.append, takeover=True).epoch == 2
    assert not pauses


def test_a_guest_has_no_files_before_its_fence(store: PosixStore) -> None:
    lease = acquire(store)
    guest = lease.guest(store.sub("trial"), is_new=True)
    guest.beat()
    guest.check()
    assert (guest.epoch, guest.id, guest.floor) == (lease.epoch, lease.id, 0)
    assert not list(store.list("trial"))
    guest.make_fence()
    guest.make_fence()
    assert [entry.key for entry in store.list("trial")] == [
        "trial/epochs/000001.floor.json",
        "trial/epochs/000001.json",
    ]


def test_a_guest_is_fenced_with_the_lease(store: PosixStore) -> None:
    first = acquire(store)
    guest = first.guest(store.sub("trial"), is_new=True)
    acquire(store, takeover=True)
    guest.beat()  # the holder has not found out yet
    with pytest.raises(Fenced):
        guest.make_fence()
    with pytest.raises(Fenced):
        guest.beat()
    with pytest.raises(Fenced):
        guest.check_commit()


def test_what_an_earlier_holder_committed_to_a_new_run_is_void(store: PosixStore, tmp_path: Path) -> None:
    """It was paused before its first checkpoint of the run, and its records about the run came too late to count."""
    trial = store.sub("trial")
    acquire(store)
    second = acquire(store, takeover=True)
    commit_directory(trial, _directory(tmp_path))
    assert [one.name for one in Catalog(trial).committed()] == ["checkpoint_000000"]
    second.guest(trial, is_new=True).make_fence()
    assert Catalog(trial).committed() == []


def test_a_run_that_goes_on_keeps_what_earlier_holders_committed(store: PosixStore, tmp_path: Path) -> None:
    trial = store.sub("trial")
    first = acquire(store)
    first.guest(trial, is_new=True).make_fence()
    commit_directory(trial, _directory(tmp_path))
    second = acquire(store, takeover=True)
    guest = second.guest(trial, is_new=False)
    guest.make_fence()
    assert guest.floor == 1
    assert [one.name for one in Catalog(trial).committed()] == ["checkpoint_000000"]


def _directory(tmp_path: Path) -> Path:
    made = tmp_path / "files"
    made.mkdir()
    (made / "weights").write_text("1")
    return made

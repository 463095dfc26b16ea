"""At most one controller counts: who holds a run is found out, waited for, or fenced off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.writer import Writer
from holdfast.control.lease import EpochFile, acquire, read_epochs
from holdfast.errors import Fenced, RunBusy
from holdfast.storage.posix import PosixStore


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "run")


def test_the_second_is_refused_and_told_who_and_since_when(store: PosixStore) -> None:
    first = acquire(store)
    assert first.epoch == 1
    with pytest.raises(RunBusy, match=r"held by .+:\d+ since 20.+takeover=True"):
        acquire(store)


def test_a_released_lease_is_free_at_once(store: PosixStore) -> None:
    acquire(store).release()
    assert acquire(store).epoch == 2


def test_takeover_fences_the_first(store: PosixStore) -> None:
    first = acquire(store)
    second = acquire(store, takeover=True)
    assert second.epoch == 2
    with pytest.raises(Fenced, match="taken over"):
        first.beat()
    second.beat()


def test_a_dead_process_on_this_machine_holds_nothing(store: PosixStore) -> None:
    program = (
        "import sys; from pathlib import Path; from holdfast.control.lease import acquire;"
        "from holdfast.storage.posix import PosixStore; acquire(PosixStore(Path(sys.argv[1])))"
    )
    subprocess.run([sys.executable, "-c", program, store.uri], check=True)
    assert acquire(store).epoch == 2


def test_a_holder_elsewhere_is_known_by_its_beat(store: PosixStore) -> None:
    """On another host only the beat tells: one that changes lives, one that does not for the time-to-live is dead."""
    lease = acquire(store)
    away = EpochFile(epoch=1, holder=Writer(host="elsewhere", pid=1), started_at="2026-01-01T00:00:00Z", floor=0)
    store.put("epochs/000001.json", msgspec.json.encode(away))
    pauses: list[float] = []

    def sleep_while_it_beats(pause_s: float) -> None:
        pauses.append(pause_s)
        lease._put(released=False)
        lease._number += 1

    with pytest.raises(RunBusy, match="elsewhere:1"):
        acquire(store, sleep=sleep_while_it_beats)
    pauses.clear()
    assert acquire(store, sleep=pauses.append).epoch == 2
    assert sum(pauses) >= away.time_to_live_s


def test_the_floor_and_the_journals_end_are_settled_behind_the_fence(store: PosixStore, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    commit_directory(store, tmp_path / "files")
    lease = acquire(store)
    assert lease.floor == 1
    (found,) = read_epochs(store)
    assert (found.epoch, found.floor) == (1, 1)
    assert found.journal is not None

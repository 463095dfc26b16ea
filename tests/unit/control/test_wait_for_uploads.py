"""Waiting for uploads of agents that a dead controller had on other machines: real storage, a clock that jumps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.unit.checkpoint.far_store import write_source
from tests.unit.checkpoint.test_part_records import sign_by_the_dead

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import upload_part
from holdfast.checkpoint.part_records import write_part_record
from holdfast.checkpoint.reserve import reserve
from holdfast.checkpoint.upload_locks import streamed_uploads
from holdfast.control.lease import acquire
from holdfast.control.wait_for_uploads import wait_for_uploads
from holdfast.core.checkpoint_types import CheckpointInfo, Draft
from holdfast.runtime import Runtime, runtime_var
from holdfast.storage.posix.store import PosixStore

INFO = CheckpointInfo(ranks=(0, 1), world_size=2, iteration=7, metrics={})


class _Clock(Runtime):
    """Time passes only in `sleep`, where others act at their times."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.plan: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.elapsed_s

    def sleep(self, seconds: float) -> None:
        self.elapsed_s += seconds
        while self.plan and self.plan[0][0] <= self.elapsed_s:
            self.plan.pop(0)[1]()


@pytest.fixture
def clock() -> Iterator[_Clock]:
    made = _Clock()
    token = runtime_var.set(made)
    yield made
    runtime_var.reset(token)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "run")


@pytest.fixture
def draft(store: PosixStore) -> Draft:
    """Of a controller of this machine that is dead."""
    lease = acquire(store)
    made = reserve(store, epoch=lease.epoch)
    lease.release()
    sign_by_the_dead(store, made)
    return made


def _part(store: PosixStore, draft: Draft, directory: Path, rank: int) -> None:
    source = write_source(directory / f"rank_{rank}", **{f"part_{rank}": "weights"})
    files = upload_part(store, draft, source, rank=rank, parent_files=None)
    write_part_record(store, draft, INFO, rank, files, generation=1)


def _void_drafts(store: PosixStore, *, far: bool = True) -> list[str]:
    lease = acquire(store)
    wait = partial(wait_for_uploads, lease=lease, far=store if far else None)
    voided = Catalog(store).void_drafts(lease.epoch, lease.floor, wait)
    lease.release()
    return voided


def test_what_agents_of_other_machines_finish_is_committed(
    store: PosixStore, draft: Draft, clock: _Clock, tmp_path: Path
) -> None:
    clock.plan = [(4.0, lambda: _part(store, draft, tmp_path, 0)), (9.0, lambda: _part(store, draft, tmp_path, 1))]
    assert _void_drafts(store) == []
    assert [one.iteration for one in Catalog(store).committed()] == [7]
    assert clock.elapsed_s < 10, "it is not waited for longer than that"


def test_a_draft_in_which_nothing_appears_is_voided_after_a_while(
    store: PosixStore, draft: Draft, clock: _Clock, tmp_path: Path
) -> None:
    clock.plan = [(4.0, lambda: _part(store, draft, tmp_path, 0))]
    assert _void_drafts(store) == [draft.name]
    assert 10 <= clock.elapsed_s < 12


def test_agents_that_never_come_to_an_end_are_not_waited_for_longer_than_they_may_take(
    store: PosixStore, draft: Draft, clock: _Clock
) -> None:
    clock.plan = [(n, partial(store.put, f"{draft.name}/file_{n}", b"x")) for n in range(1, 100)]
    assert _void_drafts(store) == [draft.name]
    assert 60 < clock.elapsed_s < 70


def test_an_agent_that_stores_through_this_process_is_waited_for_though_nothing_appears(
    store: PosixStore, draft: Draft, clock: _Clock, tmp_path: Path
) -> None:
    with ExitStack() as uploads:
        clock.plan = [
            (4.0, lambda: uploads.enter_context(streamed_uploads([draft.token]))),
            (30.0, lambda: _part(store, draft, tmp_path, 0)),
            (31.0, lambda: _part(store, draft, tmp_path, 1)),
        ]
        assert _void_drafts(store) == []
    assert [one.iteration for one in Catalog(store).committed()] == [7]


@pytest.mark.parametrize("why", ["local agents", "no time for uploads", "a live controller"])
def test_nobody_is_waited_for_where_nobody_may_come(
    why: str, store: PosixStore, clock: _Clock, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no time for uploads":
        monkeypatch.setenv("HOLDFAST_LINGER_S", "0")
    if why == "a live controller":
        monkeypatch.setattr("holdfast.checkpoint.catalog.is_dead", lambda writer: False)
    assert _void_drafts(store, far=why != "local agents") == [draft.name]
    assert clock.elapsed_s == 0

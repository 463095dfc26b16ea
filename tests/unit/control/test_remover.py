"""Every outcome of a removal becomes an event of the core."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.removal import pin, remove
from holdfast.control.blocking_calls import BlockingCalls
from holdfast.control.remover import Remover
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.errors import AccessDenied, Fenced, Unavailable


class Broken(FarStore):
    """Refuses to delete keys that end in `kept`, and to tell sizes while it is `silent`."""

    kept = ""
    silent = False

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self.kept and key.endswith(self.kept):
                raise AccessDenied("no permission")
            super().delete([key])

    def size(self, key: str) -> int:
        if self.silent:
            raise Unavailable("no answer")
        return super().size(key)


@pytest.fixture
def store(tmp_path: Path) -> Broken:
    return Broken(tmp_path / "run")


@pytest.fixture
def made(store: Broken, tmp_path: Path) -> list[Manifest]:
    source = write_source(tmp_path / "source", model="weights")
    return [commit_directory(store, source, name=name) for name in ("a", "b", "c")]


def outcome(store: Broken, manifest: Manifest, fenced: bool = False) -> e.Event:
    def check_lease() -> None:
        if fenced:
            raise Fenced("taken over")

    command = c.DeleteCheckpoint(name=manifest.name, token=manifest.token)
    return asyncio.run(Remover(store, check_lease, BlockingCalls()).remove(command))


def test_pins_are_found(store: Broken, made: list[Manifest]) -> None:
    pin(store, "a")
    pin(store, "c")
    find = c.FindPins(names=("a", "b", "c", "gone"))
    remover = Remover(store, lambda: None, BlockingCalls())
    assert asyncio.run(remover.find_pins(find)) == e.PinsFound(pinned=("a", "c"))
    store.silent = True
    assert asyncio.run(remover.find_pins(find)) == e.PinsFound(error="no answer")


def test_outcomes_of_a_removal(store: Broken, made: list[Manifest], tmp_path: Path) -> None:
    first, second, third = made
    assert outcome(store, first) == e.CheckpointRemoved(name="a", token=first.token)
    assert outcome(store, first) == e.CheckpointRemoved(name="a", token=first.token, by_others=True)
    pin(store, "b")
    assert outcome(store, second) == e.CheckpointKept(name="b", token=second.token, pinned=True)
    remove(store, "c")
    again = commit_directory(store, tmp_path / "source", name="c")
    assert outcome(store, third) == e.CheckpointRemoved(name="c", token=third.token, by_others=True)
    assert Catalog(store).committed() == [second, again]


def test_a_fenced_controller_removes_nothing(store: Broken, made: list[Manifest]) -> None:
    assert outcome(store, made[0], fenced=True) == e.ControllerFenced(why="taken over")
    assert Catalog(store).committed() == made


def test_a_failure_says_whether_readers_still_find_the_checkpoint(store: Broken, made: list[Manifest]) -> None:
    first = made[0]
    store.kept = ".manifest.json"
    kept = e.CheckpointKept(name="a", token=first.token, error="no permission")
    assert outcome(store, first) == kept
    store.kept = "model"
    gone = e.CheckpointKept(name="a", token=first.token, error="no permission", invisible=True)
    assert outcome(store, first) == gone
    store.kept = ""
    assert outcome(store, first) == e.CheckpointRemoved(name="a", token=first.token)
    assert store.list("a") == []

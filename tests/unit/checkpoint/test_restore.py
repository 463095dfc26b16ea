"""Downloading checkpoints: verified, complete or not at all; finding the newest intact one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.checkpoint.far_store import FarStore, write_source

from holdfast.checkpoint.commit import commit_directory
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.restore import fetch, newest_intact
from holdfast.errors import Damaged, NotCommitted
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Store

DAMAGE: dict[str, Callable[[Path], object]] = {
    "is missing": lambda path: path.unlink(),
    "3 bytes instead of 7": lambda path: path.write_text("abc"),
    "other bytes": lambda path: path.write_text("WEIGHTS"),
}


@pytest.fixture(params=[PosixStore, FarStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made: Store = request.param(tmp_path / "run")
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", model="weights", layers__0="zero")


def everything(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_fetch_downloads_all_files(store: Store, source: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    done = commit_directory(store, source)
    target = fetch(store, done, tmp_path / "deep" / "out", on_bytes=seen.append)
    assert everything(target) == {"model": "weights", "layers/0": "zero"}
    assert sum(seen) == done.size_bytes
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_fetch_into_an_existing_directory(store: Store, source: Path, tmp_path: Path) -> None:
    done = commit_directory(store, source)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert everything(fetch(store, done.name, empty)) == {"model": "weights", "layers/0": "zero"}
    full = write_source(tmp_path / "full", model="old", other="stays")
    assert everything(fetch(store, done.name, full)) == {"model": "weights", "layers/0": "zero", "other": "stays"}


@pytest.mark.parametrize("problem", DAMAGE)
def test_fetch_refuses_damage_and_leaves_nothing(store: Store, source: Path, tmp_path: Path, problem: str) -> None:
    done = commit_directory(store, source)
    DAMAGE[problem](tmp_path / "run" / done.name / "model")
    with pytest.raises(Damaged, match=rf"model.*{problem}.*holdfast ckpt ls"):
        fetch(store, done, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_fetch_without_verification_on_request(store: Store, source: Path, tmp_path: Path) -> None:
    done = commit_directory(store, source)
    (tmp_path / "run" / done.name / "model").write_text("WEIGHTS")
    assert everything(fetch(store, done, tmp_path / "out", verify=False))["model"] == "WEIGHTS"


def test_fetch_of_a_missing_checkpoint_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotCommitted, match="holdfast ckpt ls"):
        fetch(store, "best", tmp_path / "out")


@pytest.mark.parametrize("problem", DAMAGE)
def test_newest_intact_skips_a_damaged_checkpoint_and_reports_it(
    store: Store, source: Path, tmp_path: Path, problem: str
) -> None:
    first = commit_directory(store, source)
    (source / "model").write_text("changed")
    second = commit_directory(store, source)
    told: list[tuple[Manifest, str]] = []
    assert newest_intact(store, deep=True, on_damage=lambda *what: told.append(what)) == second
    assert told == []
    DAMAGE[problem](tmp_path / "run" / second.name / "model")
    deep = problem == "other bytes"
    assert newest_intact(store, deep=deep, on_damage=lambda *what: told.append(what)) == first
    [(manifest, why)] = told
    assert manifest == second
    assert "model" in why and problem in why and "before it is used" in why


def test_newest_intact_without_an_intact_checkpoint(store: Store, source: Path, tmp_path: Path) -> None:
    done = commit_directory(store, source)
    (tmp_path / "run" / done.name / "model").unlink()
    told: list[str] = []
    assert newest_intact(store, deep=False, on_damage=lambda found, why: told.append(found.name)) is None
    assert told == [done.name]

"""Permission bits and empty directories survive a commit, and are removed with it."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from tests.unit.checkpoint.far_store import FarStore

from holdfast.checkpoint.commit import commit_directory, merge_parts, reserve, upload_part
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpoint.manifest import Manifest, decode, encode
from holdfast.checkpoint.removal import remove
from holdfast.core.checkpoint_types import FileEntry
from holdfast.errors import Damaged
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Store

_MODES = {"run.sh": 0o755, "secret.key": 0o600, "deep/model.bin": 0o640, "shared": 0o664}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for name, mode in _MODES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        path.chmod(mode)
    (root / "empty").mkdir()
    (root / "deep" / "er" / "still").mkdir(parents=True)
    return root


@pytest.fixture(params=["local", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("HOLDFAST_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    return PosixStore(tmp_path / "run") if request.param == "local" else FarStore(tmp_path / "run")


def _modes(root: Path) -> dict[str, int]:
    return {name: stat.S_IMODE((root / name).stat().st_mode) for name in _MODES}


def test_modes_and_empty_directories_come_back(store: Store, source: Path, tmp_path: Path) -> None:
    done = commit_directory(store, source)
    assert done.directories == ("deep/er/still", "empty")
    assert {entry.path: entry.mode for entry in done.files} == _MODES
    found = Checkpoint._from_store(store, done.name)
    target = Path(found.to_directory(tmp_path / "target"))
    assert _modes(target) == _MODES
    assert (target / "empty").is_dir() and (target / "deep" / "er" / "still").is_dir()
    with found.as_directory() as directory:
        read_only = 0 if store.local_root is not None else 0o222  # a shared copy stays as it is for everybody
        assert _modes(Path(directory)) == {name: mode & ~read_only for name, mode in _MODES.items()}
        assert Path(directory, "empty").is_dir() and Path(directory, "deep", "er", "still").is_dir()


def test_a_changed_mode_does_not_change_the_parents_file(store: Store, source: Path, tmp_path: Path) -> None:
    first = commit_directory(store, source)
    (source / "run.sh").chmod(0o644)
    second = commit_directory(store, source)
    for done, mode in ((first, 0o755), (second, 0o644)):
        target = Path(Checkpoint._from_store(store, done.name).to_directory(tmp_path / done.name))
        assert _modes(target) == {**_MODES, "run.sh": mode}
        if store.local_root is not None:
            assert _modes(store.local_root / done.name) == {**_MODES, "run.sh": mode}


def test_nothing_is_left_of_a_removed_checkpoint_with_empty_directories(store: Store, source: Path) -> None:
    remove(store, commit_directory(store, source).name)
    assert store.list() == []
    assert store.children() == []


def test_two_ranks_may_have_the_same_empty_directory(store: Store, tmp_path: Path) -> None:
    draft = reserve(store)
    parts = {}
    for rank in (0, 1):
        (tmp_path / f"rank{rank}" / "logs").mkdir(parents=True)
        (tmp_path / f"rank{rank}" / f"{rank}.bin").write_bytes(b"x")
        parts[rank] = upload_part(store, draft, tmp_path / f"rank{rank}", rank=rank, parent_files=None)
    assert [entry.path for entry in merge_parts(parts)] == ["0.bin", "1.bin", "logs"]


def _sealed(body: dict[str, object]) -> bytes:
    text = msgspec.json.encode(body)
    return text[:-1] + b',"self":"' + blake3(text).hexdigest().encode() + b'"}\n'


def test_a_version_1_0_manifest_has_no_modes_and_no_empty_directories(source: Path) -> None:
    entry = FileEntry(path="a", size_bytes=1, blake3="0" * 64)
    made = Manifest(name="c", index=0, epoch=0, token="t", created_at="", writer="", files=(entry,))
    body = msgspec.json.decode(encode(made))
    del body["self"], body["directories"]
    body["format"] = "holdfast.checkpoint/1.0"
    read = decode(_sealed(body), "old")
    assert (read.files, read.directories) == ((entry,), ())
    assert b"mode" not in encode(made)


@pytest.mark.parametrize("directories", [["../out"], ["/abs"], ["a"], [".manifest.json"], ["x//y"]])
def test_directories_that_leave_the_checkpoint_are_refused(directories: list[str]) -> None:
    entry = FileEntry(path="a", size_bytes=1, blake3="0" * 64)
    made = Manifest(
        name="c", index=0, epoch=0, token="t", created_at="", writer="", files=(entry,), directories=tuple(directories)
    )
    with pytest.raises(Damaged, match="does not follow the format"):
        decode(encode(made), "here")


def test_a_mode_with_more_than_permission_bits_is_refused() -> None:
    entry = FileEntry(path="a", size_bytes=1, blake3="0" * 64, mode=0o4755)
    made = Manifest(name="c", index=0, epoch=0, token="t", created_at="", writer="", files=(entry,))
    with pytest.raises(Damaged):
        decode(encode(made), "here")

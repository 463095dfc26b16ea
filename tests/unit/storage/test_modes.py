"""Permissions: private directories, and files that keep the restrictions of their modes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.storage.posix.atomic_file import AtomicFile
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.private_directory import claim_private_directory, make_private_directory


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o755, 0o400])
@pytest.mark.parametrize("size_bytes", [10, 3 * 1024**2])
def test_a_stored_file_is_not_more_readable_than_its_source(
    tmp_path: Path, umask: int, mode: int, size_bytes: int, unnamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AtomicFile, "unnamed", unnamed)
    source = tmp_path / "source"
    source.write_bytes(bytes(size_bytes))
    source.chmod(mode)
    store = PosixStore(tmp_path / "store")
    store.upload("kept", source)
    store.copy("kept", "copied")
    store.download("kept", tmp_path / "back")
    for copy in (tmp_path / "store" / "kept", tmp_path / "store" / "copied", tmp_path / "back"):
        assert _mode(copy) == mode & ~umask


def test_objects_without_a_mode_get_the_umask(tmp_path: Path, umask: int) -> None:
    store = PosixStore(tmp_path / "store")
    store.put("a", b"1")
    store.create("b", b"2")
    assert _mode(tmp_path / "store" / "a") == _mode(tmp_path / "store" / "b") == 0o666 & ~umask
    assert _mode(tmp_path / "store") == 0o777 & ~umask


def test_private_directories_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    made = make_private_directory(tmp_path / "a" / "b" / "c")
    assert [_mode(path) for path in (made, made.parent, made.parent.parent)] == [0o700] * 3


def test_our_directory_with_open_permissions_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old").chmod(0o755)
    make_private_directory(tmp_path / "old")
    assert _mode(tmp_path / "old") == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_directory(tmp_path / "file")


def test_a_directory_in_a_public_place_is_claimed_again_by_its_owner(tmp_path: Path, umask: int) -> None:
    ours = tmp_path / "holdfast-0"
    assert _mode(claim_private_directory(ours)) == 0o700
    ours.chmod(0o755)
    assert _mode(claim_private_directory(ours)) == 0o700


def test_a_directory_that_others_could_have_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()
    for name, why in [("link", "Not a directory"), ("open", "others may write"), ("file", "Not a directory")]:
        with pytest.raises(ConfigError, match=f"{name} .*{why}.*HOLDFAST_LOCAL_CACHE_DIR"):
            claim_private_directory(tmp_path / name)


@pytest.mark.hosts
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 4242, 4242)
    with pytest.raises(ConfigError, match="another user"):
        claim_private_directory(tmp_path / "theirs")

"""Directories are created, pruned and created again, also while other processes remove them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.storage.posix.directories import Directories


def _open(directories: Directories, directory: Path, root: Path) -> None:
    fd = directories.open(directory, root)
    try:
        assert os.path.samestat(os.fstat(fd), directory.stat())
    finally:
        os.close(fd)


def test_a_directory_removed_by_another_process_is_made_again(tmp_path: Path) -> None:
    directories, root = Directories(), tmp_path / "root"
    for gone in ("a/b/c", "a/b", "a", "."):
        _open(directories, root / "a" / "b" / "c", root)
        _open(directories, root / "a" / "b" / "d", root)
        shutil.rmtree(root / gone)
        _open(directories, root / "a" / "b" / "c", root)
        shutil.rmtree(root / gone)
        _open(directories, root / "a" / "b" / "c" / "deeper", root)


def test_a_directory_removed_right_after_its_creation_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, vanished = Path.mkdir, list[Path]()

    def mkdir(path: Path) -> None:
        if not vanished:
            vanished.append(path)  # it was there when mkdir looked, and is gone now
            raise FileExistsError(17, "File exists", str(path))
        really(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    _open(Directories(), tmp_path / "a", tmp_path)
    assert vanished


def test_pruning_stops_at_the_root_and_at_non_empty_directories(tmp_path: Path) -> None:
    directories, root = Directories(), tmp_path / "root"
    _open(directories, root / "a" / "b" / "c", root)
    (root / "a" / "kept").write_bytes(b"")
    directories.sync_deletion(root / "a" / "b" / "c", root)
    assert sorted(path.name for path in (root / "a").iterdir()) == ["kept"]
    (root / "a" / "kept").unlink()
    directories.sync_deletion(root / "a" / "b" / "c", root)
    assert root.is_dir()
    assert list(root.iterdir()) == []


def test_a_file_or_dangling_link_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(NotADirectoryError):
        Directories().open(tmp_path / "file", tmp_path)
    with pytest.raises(NotADirectoryError):
        Directories().open(tmp_path / "file" / "below", tmp_path)
    with pytest.raises(FileNotFoundError):
        Directories().open(tmp_path / "dangling", tmp_path)
    assert not (tmp_path / "nowhere").exists()

"""Directories that only their owner may enter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.storage.private_directory import make_private_directory


def test_missing_parents_are_made_private_and_existing_ones_stay(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    made = make_private_directory(tmp_path / "a" / "b")
    assert [one.stat().st_mode & 0o777 for one in (made, made.parent, tmp_path)] == [0o700, 0o700, 0o755]


def test_a_filesystem_where_nothing_can_be_made_keeps_its_mode() -> None:
    mode = Path("/proc").stat().st_mode
    with pytest.raises(OSError):
        make_private_directory(Path("/proc/no/home/here"))
    assert Path("/proc").stat().st_mode == mode


def test_a_parent_that_somebody_else_makes_meanwhile_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, mkdir = tmp_path / "a" / "b", Path.mkdir

    def mkdir_beside_another(path: Path, *arguments: Any, **options: Any) -> None:
        try:
            mkdir(path, *arguments, **options)
        except FileNotFoundError:
            mkdir(directory.parent)
            raise

    monkeypatch.setattr(Path, "mkdir", mkdir_beside_another)
    assert make_private_directory(directory).is_dir()

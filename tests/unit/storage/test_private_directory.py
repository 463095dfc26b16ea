"""Directories that only their owner may enter."""

from __future__ import annotations

from pathlib import Path

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

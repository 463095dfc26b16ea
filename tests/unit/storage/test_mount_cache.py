"""How long a mount shows old names: from the daemon's command line, or from the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.storage import mount_cache
from holdfast.storage.files import Mount, mount_of
from holdfast.storage.mount_cache import MountCache, _seconds, _value, find_mount_cache


def test_a_local_directory_has_no_mount_cache(tmp_path: Path) -> None:
    assert find_mount_cache(tmp_path) is None


def test_the_mount_cache_time_can_be_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_cache, "mount_of", lambda _: Mount("fuse.other", "/mnt"))
    assert find_mount_cache(tmp_path) == MountCache("fuse.other", None)
    monkeypatch.setenv("HOLDFAST_MOUNT_CACHE_S", "2.5")
    assert find_mount_cache(tmp_path) == MountCache("fuse.other", 2.5)
    monkeypatch.setenv("HOLDFAST_MOUNT_CACHE_S", "soon")
    with pytest.raises(ConfigError, match="HOLDFAST_MOUNT_CACHE_S='soon' is no number of seconds"):
        find_mount_cache(tmp_path)


def test_a_mount_of_a_container_storage_driver_has_no_program_in_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_cache, "mount_of", lambda _: Mount("fuse", "/mnt"))
    assert find_mount_cache(tmp_path) == MountCache("fuse", None)
    monkeypatch.setattr(mount_cache, "mount_of", lambda _: Mount("fuseblk", "/mnt"))  # a local disk
    assert find_mount_cache(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300.0), ("1ms", 0.001), ("90", 90.0), ("-1", None), ("5m0s", None), ("1.5s", 1.5)]
)
def test_parsing_of_durations(text: str, seconds: float | None) -> None:
    assert _seconds(text) == seconds


def test_parsing_of_mount_daemon_flags() -> None:
    arguments = ["rclone", "mount", "--dir-cache-time", "1s", "--attr-timeout=2s", "-stat-cache-ttl=3s", "/mnt"]
    assert [_value(arguments, flag) for flag in ("--dir-cache-time", "--attr-timeout", "--stat-cache-ttl")] == [
        "1s",
        "2s",
        "3s",
    ]
    assert _value(arguments, "--type-cache-ttl") is None


def test_the_mount_of_a_directory_that_is_not_made_yet(tmp_path: Path) -> None:
    assert mount_of(tmp_path / "a" / "b") == mount_of(tmp_path) != None  # noqa: E711

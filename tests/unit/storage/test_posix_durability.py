"""After a crash: no partial files, and everything durable that was reported as stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.storage.files import mount_kind
from holdfast.storage.posix.atomic_file import AtomicFile
from holdfast.storage.posix.store import PosixStore


def _files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


_UPLOADER = """
import os, sys
from pathlib import Path
from holdfast.storage.posix.store import PosixStore
seen = 0
def halfway(count):
    global seen
    seen += count
    if seen >= 3_000_000:
        print("halfway", flush=True)
        sys.stdin.readline()
PosixStore(Path(sys.argv[1])).upload("d/k", Path(sys.argv[2]), halfway)
"""


def test_a_killed_upload_leaves_nothing(tmp_path: Path) -> None:
    if mount_kind(tmp_path) not in ("ext4", "xfs", "btrfs", "tmpfs"):
        pytest.skip("this filesystem may have no nameless files")
    store, source = PosixStore(tmp_path / "root"), tmp_path / "source"
    source.write_bytes(bytes(6_000_000))
    store.put("d/k", b"old")
    command = [sys.executable, "-c", _UPLOADER, str(tmp_path / "root"), str(source)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as uploader:
        try:
            assert uploader.stdout is not None
            assert uploader.stdout.readline() == "halfway\n"
        finally:
            uploader.kill()
    assert _files(tmp_path / "root") == ["k"]
    assert store.get("d/k") == b"old"


def test_files_are_synced_before_they_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's bytes, then its name; each new directory's name, too."""
    steps: list[str] = []
    fsync, link, rename = os.fsync, os.link, os.rename

    def noting_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115  no real path while it has no name
        steps.append(f"fsync {path.name if path.is_dir() else 'file'}")
        fsync(fd)

    def noting_link(source: str, target: str, **more: Any) -> None:
        steps.append("publish" if not target.startswith(".tmp-") else "name")
        link(source, target, **more)

    def noting_rename(source: str, target: str, **more: Any) -> None:
        steps.append("publish")
        rename(source, target, **more)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "link", noting_link)
    monkeypatch.setattr(os, "rename", noting_rename)
    for unnamed in (True, False):
        monkeypatch.setattr(AtomicFile, "unnamed", unnamed)
        root = tmp_path / f"root {unnamed}"
        store = PosixStore(root)
        store.create("d/x", b"1")
        assert steps == [f"fsync {tmp_path.name}", f"fsync {root.name}", "fsync file", "publish", "fsync d"]
        steps.clear()
        store.put("d/x", b"2")
        assert steps[0] == "fsync file"
        assert steps[-2:] == ["publish", "fsync d"]
        steps.clear()
        store.delete(["d/x"])
        assert steps == ["fsync d"]
        steps.clear()

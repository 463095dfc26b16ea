"""A staged directory is complete, independent of the user's files, and never a hard link."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from holdfast.errors import CheckpointError, OutOfSpace
from holdfast.worker import staging
from holdfast.worker.staging import stage


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "user"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "model.pt").write_bytes(os.urandom(3_000_000))
    (root / "deep" / "er" / "part.bin").write_bytes(b"part")
    (root / "empty").write_bytes(b"")
    (root / "nothing").mkdir()
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_staged_copy_is_independent_of_the_users_files(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    target = tmp_path / "staging" / "g1-r0-n1"
    stage(source, target, move=False)
    assert contents(target) == before
    with (source / "model.pt").open("r+b") as file:
        file.write(b"overwritten in place")
    (source / "deep" / "er" / "part.bin").unlink()
    assert contents(target) == before


def test_no_file_is_shared_by_a_hard_link(source: Path, tmp_path: Path) -> None:
    stage(source, tmp_path / "target", move=False)
    assert (source / "model.pt").stat().st_nlink == 1
    assert (tmp_path / "target" / "model.pt").stat().st_ino != (source / "model.pt").stat().st_ino


def test_staging_with_move_renames(source: Path, tmp_path: Path) -> None:
    before, inode = contents(source), source.stat().st_ino
    stage(source, tmp_path / "target", move=True)
    assert not source.exists()
    assert contents(tmp_path / "target") == before
    assert (tmp_path / "target").stat().st_ino == inode


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second filesystem")
def test_staging_with_move_across_filesystems_copies_and_removes(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    made = Path(tempfile.mkdtemp(prefix="holdfast-staging-", dir="/dev/shm"))
    target = made / "target"
    try:
        stage(source, target, move=True)
        assert contents(target) == before
        assert not source.exists()
    finally:
        shutil.rmtree(made)


def test_files_with_other_hard_links_are_copied_not_renamed(source: Path, tmp_path: Path) -> None:
    """The other name could still be written to."""
    other = tmp_path / "other-name"
    other.hardlink_to(source / "model.pt")
    before = contents(source)
    stage(source, tmp_path / "target", move=True)
    other.write_bytes(b"changed through the other name")
    assert contents(tmp_path / "target") == before
    assert not source.exists()


def test_symbolic_links_are_followed_when_staging(source: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "shared.bin").write_bytes(b"shared")
    (source / "link.bin").symlink_to(outside / "shared.bin")
    (source / "linked").symlink_to(outside)
    stage(source, tmp_path / "target", move=True)
    (outside / "shared.bin").unlink()
    found = contents(tmp_path / "target")
    assert found["link.bin"] == found["linked/shared.bin"] == b"shared"
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))


def test_a_committed_checkpoint_is_staged_without_its_manifest(source: Path, tmp_path: Path) -> None:
    (source / ".manifest.json").write_bytes(b"{}")
    (source / ".metadata.json").write_bytes(b"{}")
    stage(source, tmp_path / "target", move=True)
    assert (source / ".manifest.json").exists()
    assert ".manifest.json" not in contents(tmp_path / "target")
    assert ".metadata.json" in contents(tmp_path / "target")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone is not there"):
        stage(tmp_path / "gone", tmp_path / "target", move=False)


def test_a_named_pipe_is_refused_without_blocking(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(CheckpointError, match="pipe is neither a file nor a directory"):
        stage(source, tmp_path / "target", move=False)
    assert not (tmp_path / "target").exists()


def test_dangling_and_cyclic_links_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "dangling").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="dangling vanished, or is a link to nothing"):
        stage(source, tmp_path / "target", move=False)
    (source / "dangling").unlink()
    (source / "loop").symlink_to(source)
    with pytest.raises(CheckpointError, match=r"contains itself at .*loop"):
        stage(source, tmp_path / "target", move=False)
    assert not (tmp_path / "target").exists()


def test_staging_on_a_full_disk_names_the_directory_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(reader: int, writer: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staging, "reflink", lambda reader, writer: False)
    monkeypatch.setattr(staging, "copy_bytes", full)
    with pytest.raises(OutOfSpace, match="no room for a copy of the checkpoint"):
        stage(source, tmp_path / "target", move=False)
    assert not (tmp_path / "target").exists()
    assert source.is_dir()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_staged_files_keep_their_modes(tmp_path: Path, umask: int) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub").chmod(0o750)
    modes = {"secret": 0o600, "shared": 0o644, "script.sh": 0o755, "frozen": 0o444, "sub/inner": 0o640}
    for name, mode in modes.items():
        (source / name).write_text(name)
        (source / name).chmod(mode)
    before = os.umask(umask)
    try:
        stage(source, tmp_path / "cache" / "staged", move=False)
    finally:
        os.umask(before)
    assert {name: (tmp_path / "cache" / "staged" / name).stat().st_mode & 0o777 for name in modes} == modes
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700

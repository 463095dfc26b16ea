"""The POSIX store where filesystems differ: full, read-only, without hard links, without nameless files."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.mounts import read_only_bind, tmpfs

from holdfast.errors import AccessDenied, AlreadyExists, NotFound, OutOfSpace, StorageError, Unavailable
from holdfast.storage import transfer
from holdfast.storage.files import copy_bytes, mount_kind, write_all
from holdfast.storage.keys import new_temporary
from holdfast.storage.locate import open_store
from holdfast.storage.posix import store as posix
from holdfast.storage.posix.atomic_file import AtomicFile
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Entry


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "tiny") as path:
        yield path


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    PosixStore(tmp_path / "writable").put("run/kept", b"kept")
    with read_only_bind(tmp_path / "writable", tmp_path / "ro") as path:
        yield path


@pytest.mark.parametrize(
    ("root", "text"),
    [
        ("/proc/none/run", "/proc/none/run does not exist: check the path."),
        ("/dev/null/run", "/dev/null/run lies below a file, not a directory: choose another path."),
    ],
    ids=["cannot be made", "below a file"],
)
def test_a_root_that_cannot_be_used_is_named_as_the_user_did(root: str, text: str) -> None:
    with pytest.raises(StorageError) as raised:
        _ = PosixStore(Path(root)).exclusive
    assert str(raised.value) == text


@pytest.mark.hosts
def test_a_root_that_takes_no_files_is_named_without_the_probe(read_only: Path) -> None:
    with pytest.raises(AccessDenied) as raised:
        _ = PosixStore(read_only).exclusive
    assert str(raised.value).startswith(f"{read_only} is on a read-only filesystem")


def _files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


@pytest.mark.hosts
def test_a_full_disk_raises_out_of_space_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    store = PosixStore(tiny / "run")
    store.put("kept", b"kept")
    (tmp_path / "small").write_bytes(bytes(1_048_575))
    (tmp_path / "large").write_bytes(bytes(5_000_000))
    big = bytes(2_000_000)
    calls: list[Callable[[], object]] = [
        lambda: store.put("kept", big),
        lambda: store.create("new", big),
        lambda: store.upload("kept", tmp_path / "small"),
        lambda: store.upload("kept", tmp_path / "large"),
        lambda: PosixStore(tmp_path).download("large", tiny / "target"),
    ]
    for call in calls:
        with pytest.raises(OutOfSpace, match=r"No space is left to write .*tiny.*: free some, or choose another"):
            call()
        assert _files(tiny) == ["kept"]
        assert store.get("kept") == b"kept"
    store.put("kept", b"fits again")


@pytest.mark.hosts
def test_a_read_only_path_can_be_read_and_refuses_writes(read_only: Path, tmp_path: Path) -> None:
    store = open_store(read_only / "run")
    assert store.list() == [Entry("kept", 4)]
    assert store.get("kept") == b"kept"
    assert store.download("kept", tmp_path / "target").size_bytes == 4
    assert open_store(read_only / "absent").list() == []
    (tmp_path / "source").write_bytes(b"1")
    calls: list[Callable[[], object]] = [
        lambda: store.put("kept", b"2"),
        lambda: store.create("new/dir/x", b"2"),
        lambda: store.copy("kept", "copy"),
        lambda: store.upload("kept", tmp_path / "source"),
        lambda: store.delete(["kept"]),
        lambda: store.exclusive,
    ]
    for call in calls:
        with pytest.raises(AccessDenied, match=r"ro/run.* is on a read-only filesystem: choose a storage path"):
            call()
    assert store.list() == [Entry("kept", 4)]


def test_temporaries_are_never_listed_and_never_keys(tmp_path: Path) -> None:
    store, name = PosixStore(tmp_path), new_temporary()
    store.put("d/x", b"1")
    (tmp_path / "d" / name).write_bytes(b"half")
    assert store.list() == [Entry("d/x", 1)]
    assert store.children("d") == []
    with pytest.raises(ValueError, match="temporaries"):
        store.get(f"d/{name}")


def test_symbolic_links_and_special_files_in_listings(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "root")
    store.put("d/x", b"123")
    root = tmp_path / "root"
    (root / "d" / "link").symlink_to("x")
    (root / "d" / "dangling").symlink_to("nowhere")
    (root / "circle").symlink_to(root)
    os.mkfifo(root / "pipe")
    assert [entry.key for entry in store.list()] == ["d/link", "d/x"]
    assert store.children() == ["d"]
    store.copy("d/link", "elsewhere/y")
    assert store.get("elsewhere/y") == b"123"
    assert not (root / "elsewhere" / "y").is_symlink()
    with pytest.raises(NotFound):
        store.size("pipe")


def test_copies_are_hard_links_that_separate_when_written(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.put("a", b"x" * 100_000)
    store.copy("a", "d/b")
    shared = (tmp_path / "a").stat().st_ino == (tmp_path / "d" / "b").stat().st_ino
    assert shared or mount_kind(tmp_path) in ("btrfs", "xfs")
    store.copy("a", "d/b")
    store.put("a", b"new")
    assert store.get("d/b") == b"x" * 100_000
    assert _files(tmp_path) == ["a", "b"]


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*rest: object, **more: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(AtomicFile, "unnamed", True)


def test_copies_and_creations_work_without_hard_links(no_links: None, tmp_path: Path) -> None:
    """As on a FUSE mount: nothing but plain files, created in place."""
    store = PosixStore(tmp_path / "root")
    assert store.exclusive
    store.create("d/x", b"first")
    with pytest.raises(AlreadyExists):
        store.create("d/x", b"second")
    store.put("d/x", b"put")
    store.copy("d/x", "d/y")
    (tmp_path / "source").write_bytes(bytes(3_000_001))
    store.upload("d/z", tmp_path / "source")
    assert not AtomicFile.unnamed, "nameless files are given up where they cannot be linked"
    assert store.list() == [Entry("d/x", 3), Entry("d/y", 3), Entry("d/z", 3_000_001)]
    assert _files(tmp_path / "root") == ["x", "y", "z"]


def test_uploads_in_place_check_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "mount_kind", lambda directory: "fuse.test")
    store, source = PosixStore(tmp_path / "root"), tmp_path / "source"
    source.write_bytes(b"x" * 2_500_000)
    assert store.upload("d/k", source).size_bytes == 2_500_000
    assert store.get("d/k") == source.read_bytes()

    def torn(fd: int, data: memoryview) -> None:
        write_all(fd, data[: len(data) // 2])  # a mount that says yes to all and keeps half

    monkeypatch.setattr(transfer, "write_all", torn)
    with pytest.raises(Unavailable, match=r"of 2500000 bytes after its upload"):
        store.upload("d/k", source)
    assert store.list() == []


def test_failed_uploads_without_o_tmpfile_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AtomicFile, "unnamed", False)
    store, source = PosixStore(tmp_path / "root"), tmp_path / "source"
    source.write_bytes(bytes(3_000_000))
    store.put("d/x", b"1")
    store.create("d/y", b"2")
    with pytest.raises(AlreadyExists):
        store.create("d/y", b"3")
    store.upload("d/z", source)

    def abandon(count: int) -> None:
        assert len(_files(tmp_path / "root")) == 4, "the draft has a name here"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.upload("d/z", source, abandon)
    assert _files(tmp_path / "root") == ["x", "y", "z"]


def test_a_filesystem_that_accepts_o_direct_but_refuses_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def picky(fd: int, data: memoryview) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        write_all(fd, data)

    monkeypatch.setattr(transfer, "write_all", picky)
    data = os.urandom(3_333_333)
    (tmp_path / "source").write_bytes(data)
    store = PosixStore(tmp_path / "root")
    if mount_kind(tmp_path) == "tmpfs":
        pytest.skip("temporary files are on tmpfs here")
    store.upload("k", tmp_path / "source")
    assert store.get("k") == data
    assert refused


def test_a_key_below_a_file_or_over_a_directory_is_refused(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.put("a", b"1")
    store.put("d/x", b"1")
    with pytest.raises(StorageError, match="lies below a file"):
        store.put("a/b", b"2")
    with pytest.raises(StorageError, match="is a directory"):
        store.put("d", b"2")
    with pytest.raises(StorageError, match="shorten it"):
        store.put("n" * 300, b"2")
    assert store.list() == [Entry("a", 1), Entry("d/x", 1)]
    assert _files(tmp_path) == ["a", "x"]


def test_copy_bytes_without_copy_file_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(2_500_000)
    (tmp_path / "a").write_bytes(data)

    def halfway(source: int, target: int, count: int, start: int, at: int) -> int:
        if start:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return os.pwrite(target, os.pread(source, 1_000_000, 0), 0)

    for stand_in in (halfway, lambda *rest: 0):
        monkeypatch.setattr(os, "copy_file_range", stand_in)
        with (tmp_path / "a").open("rb") as source, (tmp_path / "b").open("wb") as target:
            copy_bytes(source.fileno(), target.fileno())
        assert (tmp_path / "b").read_bytes() == data


@pytest.mark.hosts
def test_another_users_directory_raises_access_denied(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    PosixStore(locked).put("run/x", b"1")
    locked.chmod(0o700)
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    code = 1
    try:
        os.setuid(65534)
        store = open_store(locked / "run")
        calls: list[Callable[[], object]] = [store.list, lambda: store.get("x"), lambda: store.put("x", b"2")]
        for call in calls:
            with pytest.raises(AccessDenied, match=r"Access to .*/locked/run.* was refused .* check its owner"):
                call()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("call", ["fsync", "close"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EPERM])
def test_a_creation_that_fails_because_another_mount_was_faster_is_a_lost_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """gcsfuse answers ESTALE to fsync or close when another mount has created the object meanwhile; rclone EPERM."""
    store = PosixStore(tmp_path)
    store.put("other", b"")
    store._shared.links = False
    real = getattr(os, call)

    def fail(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        real(fd)
        if path.name == "k":
            path.write_bytes(b"theirs")
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(AlreadyExists):
        store.create("k", b"ours")
    assert (tmp_path / "k").read_bytes() == b"theirs", "the winner's file must stay"


def test_a_creation_whose_close_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PosixStore(tmp_path)
    store.put("other", b"")
    store._shared.links = False
    real = os.close

    def fail(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        real(fd)
        if path.name == "k":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", fail)
    with pytest.raises(Unavailable):
        store.create("k", b"ours")
    assert [entry.key for entry in store.list()] == ["other"]

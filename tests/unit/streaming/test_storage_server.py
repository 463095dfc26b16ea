"""The storage server: who may use it, what it serves, and what is left when a transfer breaks off."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.mounts import tmpfs

from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.reserve import reserve
from holdfast.checkpoint.restore import fetch
from holdfast.checkpoint.upload import upload_part
from holdfast.checkpoint.verify import verify
from holdfast.core.failure_kind import FailureKind
from holdfast.errors import AccessDenied, NotFound, OutOfSpace, Unavailable
from holdfast.storage.durability import volatile
from holdfast.storage.locate import open_store
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import InMemory
from holdfast.streaming import messages as m
from holdfast.streaming.client import StreamedStore, open_streamed, use_streamed
from holdfast.streaming.connection import Connection, dial
from holdfast.streaming.server import Listening, Settings, StorageServer

_replies = msgspec.msgpack.Decoder(m.Reply)
_BIG = os.urandom(5 * 1024 * 1024)


@contextmanager
def _serving(root: Path) -> Iterator[m.ServedStorage]:
    server = StorageServer(Settings(root=str(root), key="key", hosts=["127.0.0.1"]))
    try:
        yield m.ServedStorage(root=str(root), host="127.0.0.1", port=server.port, key="key")
    finally:
        server.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[m.ServedStorage]:
    (tmp_path / "run").mkdir()
    with _serving(tmp_path / "run") as served:
        yield served


@pytest.fixture
def store(served: m.ServedStorage) -> Iterator[StreamedStore]:
    store = StreamedStore(served)
    yield store
    store.close()


@contextmanager
def _dialled(served: m.ServedStorage) -> Iterator[Connection]:
    connection = dial(served.host, served.port, served.key)
    connection.set_timeout(60)
    try:
        yield connection
    finally:
        connection.close()


def _files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))


def test_a_client_with_another_key_is_refused(served: m.ServedStorage) -> None:
    with pytest.raises(AccessDenied, match="serves another run"):
        StreamedStore(msgspec.structs.replace(served, key="other")).get("k")


@pytest.mark.parametrize(
    "key", [b"../outside", b"/etc/passwd", b"a/../../outside", b"link", b"link/outside", b"", b"."]
)
def test_nothing_outside_the_directory_can_be_named(served: m.ServedStorage, tmp_path: Path, key: bytes) -> None:
    (tmp_path / "outside").write_text("secret")
    link = tmp_path / "run" / "link"
    link.symlink_to(tmp_path if key == b"link/outside" else tmp_path / "outside")
    requests: list[m.Request] = [
        m.Read(key=key),
        m.Stat(key=key),
        m.Put(key=key, data=b"x"),
        m.Create(key=key, data=b"x"),
        m.Delete(keys=[key]),
        m.Copy(source=key, target=b"copy"),
        m.Copy(source=b"copy", target=key),
        m.Receive(key=key, size_bytes=0),
    ]
    if key:
        requests += [m.List(prefix=key), m.Children(prefix=key)]
    for request in requests:
        with _dialled(served) as connection:
            connection.send(request)
            reply = connection.receive(_replies)
            assert reply is not None
            assert reply.failure in (FailureKind.ACCESS_DENIED, FailureKind.INVALID_URI), request
            assert "secret" not in reply.error
    assert (tmp_path / "outside").read_text() == "secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "run"]


@pytest.mark.parametrize("size_bytes", [1000, len(_BIG)])
def test_a_connection_that_is_cut_in_a_file_leaves_nothing(
    served: m.ServedStorage, tmp_path: Path, size_bytes: int
) -> None:
    with _dialled(served) as connection:
        connection.send(m.Receive(key=b"dir/file", size_bytes=size_bytes))
        connection._send_chunk(memoryview(_BIG)[: size_bytes // 2])
    with _dialled(served) as connection:  # whatever the first thread does, nothing is listed
        connection.send(m.List(prefix=b""))
        reply = connection.receive(_replies)
        assert reply is not None and reply.value == []
    _wait_until_no_connection_is_served()
    assert [name for name in _files(tmp_path / "run") if name != "dir"] == []


def _wait_until_no_connection_is_served() -> None:
    for thread in threading.enumerate():
        if thread.name == "storage":
            thread.join(60)


def test_a_connection_that_ends_in_a_file_raises_unavailable_at_the_reader(tmp_path: Path) -> None:
    """As when the server is killed: the store is to be asked again."""
    (tmp_path / "run").mkdir()
    with _serving(tmp_path / "run") as served:
        store = StreamedStore(served)
        store.put("k", b"data")
    _wait_until_no_connection_is_served()
    with pytest.raises(Unavailable):
        store.get("k")


def test_a_client_that_is_told_no_in_the_middle_of_a_file_learns_why(store: StreamedStore, tmp_path: Path) -> None:
    (tmp_path / "run" / "file").write_text("not a directory")
    source = tmp_path / "source"
    source.write_bytes(_BIG * 4)
    for one in (source, InMemory(memoryview(_BIG * 4))):
        with pytest.raises(Exception, match="lies below a file"):
            store.upload("file/below", one)
    assert store.get("file") == b"not a directory", "the store can be used further"


@pytest.mark.hosts
def test_a_full_disk_is_told_as_such_and_leaves_nothing(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small") as root, _serving(root / "run") as served:
        store = StreamedStore(served)
        with pytest.raises(OutOfSpace, match="No space is left"):
            store.upload("big", InMemory(memoryview(_BIG)))
        store.put("small", b"fits")
        assert [entry.key for entry in store.list()] == ["small"]
        store.close()
        _wait_until_no_connection_is_served()


def test_modes_of_files_are_kept(store: StreamedStore, tmp_path: Path) -> None:
    source = tmp_path / "script"
    source.write_text("#!/bin/sh")
    source.chmod(0o750)
    store.upload("script", source)
    assert (tmp_path / "run" / "script").stat().st_mode & 0o777 == 0o750


def test_a_file_is_stored_on_a_mount_that_has_one_mode_for_all_files(
    store: StreamedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    source = tmp_path / "script"
    source.write_text("#!/bin/sh")
    source.chmod(0o777)  # more than the umask lets a new file have
    monkeypatch.setattr(Path, "chmod", refuse)
    store.upload("script", source)
    assert (tmp_path / "run" / "script").read_text() == "#!/bin/sh"


def test_a_part_that_streams_is_committed_by_the_head_with_its_empty_directories(
    store: StreamedStore, tmp_path: Path
) -> None:
    source, head = tmp_path / "source", PosixStore(tmp_path / "run")
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "weights").write_bytes(_BIG)
    draft = reserve(head)
    files = upload_part(store, draft, source, rank=0, parent_files=None)
    assert (tmp_path / "run" / draft.name / "weights").read_bytes() == _BIG
    commit(head, draft, files)
    assert (tmp_path / "run" / draft.name / "deep" / "empty").is_dir()
    assert fetch(store, draft.name, tmp_path / "target").joinpath("deep", "empty").is_dir()
    assert not verify(head, deep=True).damaged


def test_the_digest_of_an_upload_is_of_what_arrived(store: StreamedStore, tmp_path: Path) -> None:
    digest = store.upload("k", InMemory(memoryview(_BIG)))
    with pytest.raises(Unavailable, match="did not arrive as it was sent"):
        store.upload("k", InMemory(memoryview(_BIG)[1:], digest))


def test_names_that_are_no_text_are_stored(store: StreamedStore, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe")
    store.put(name, b"x")
    assert [entry.key for entry in store.list()] == [name] and store.get(name) == b"x"
    with pytest.raises(NotFound):
        store.get(name + "2")


def test_connections_are_used_again_also_after_what_is_not_there(store: StreamedStore) -> None:
    store.put("k", b"x")
    idle = list(store._connections._idle)
    for _ in range(3):
        with pytest.raises(NotFound):
            store.get("absent")
        assert store.get("k") == b"x"
    assert store._connections._idle == idle and len(idle) == 1


def test_a_forked_child_has_connections_of_its_own(store: StreamedStore) -> None:
    store.put("k", b"x")
    if (pid := os.fork()) == 0:
        os._exit(0 if store.get("k") == b"x" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.get("k") == b"x"


def test_a_volatile_view_stores_as_well(store: StreamedStore) -> None:
    view = volatile(store)
    assert view is not store
    view.put("k", b"x")
    assert store.get("k") == b"x"


def test_a_directory_that_is_served_is_opened_there_and_not_on_this_machine(
    served: m.ServedStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.storage.locate._elsewhere", {})
    here = tmp_path / "here"
    (here / "run").mkdir(parents=True)
    with closing(open_streamed(served, str(tmp_path / "run" / "sub"))) as store:
        store.put("k", b"there")
    use_streamed(msgspec.structs.replace(served, root=str(here / "run")))
    with closing(open_store(here / "run" / "sub")) as found:
        assert found.get("k") == b"there"
    assert open_store(f"file://{here}/run").local_root is None
    assert open_store(here / "running").local_root == here / "running"
    assert _files(here) == ["run"]


class _Listener:
    """A listening socket whose thread takes its time between two steps."""

    def __init__(self) -> None:
        self.may_accept = threading.Event()
        self.has_accepted = threading.Event()
        self.is_closed = threading.Event()
        self.was_closed_early = False

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def accept(self) -> None:
        assert self.may_accept.wait(60)
        self.was_closed_early = self.is_closed.is_set()
        self.has_accepted.set()
        raise OSError(errno.EINVAL, "shut down")

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        self.is_closed.set()


def test_a_listener_is_not_closed_under_the_thread_that_is_about_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its number there may be another socket by then, whose connections it would take."""
    listener = _Listener()
    monkeypatch.setattr("holdfast.streaming.server._listen", lambda *_: [listener])
    StorageServer(Settings(key="key", hosts=["127.0.0.1"])).close()
    listener.may_accept.set()
    assert listener.has_accepted.wait(60) and not listener.was_closed_early
    assert listener.is_closed.wait(60)


def test_the_process_serves_until_its_standard_input_ends(tmp_path: Path) -> None:
    settings = Settings(root=str(tmp_path / "run"), key="key", hosts=["127.0.0.1", "127.0.0.2"])
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.streaming.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()
        port = msgspec.json.decode(process.stdout.readline(), type=Listening).port
        for host in settings.hosts:
            store = StreamedStore(m.ServedStorage(root=settings.root, host=host, port=port, key="key"))
            store.put(host, b"x")
            store.close()
        process.stdin.close()
        assert process.wait(60) == 0
    assert _files(tmp_path / "run") == settings.hosts

"""Files that stream to the driver's machine, over TLS on loopback, against a stream into nothing, one that a single
thread receives, hashes, writes and syncs, and against writing them directly. And a state that streams back: from the
memory of another agent, against the driver's machine.

`python -m bench.stream --size 256MiB --rounds 3`. Every receiver is a process of its own. The sender's files lie in the
page cache; ours sends as many at once as an agent does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from bench.store import parse_size
from bench.timing import Aim, Contender, Section, print_section, race
from blake3 import blake3

from holdfast.agent.buffers import Buffers, SnapshotMemory
from holdfast.agent.snapshot_fetch import SnapshotFetch
from holdfast.agent.snapshot_server import ServedSnapshots
from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.reserve import reserve
from holdfast.checkpoint.restore import fetch_manifest
from holdfast.checkpoint.state.skeleton import FILE
from holdfast.checkpoint.upload import upload_part
from holdfast.core.checkpoint_types import MemoryFile, Snapshot
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Store
from holdfast.streaming.client import StreamedStore
from holdfast.streaming.messages import ServedStorage
from holdfast.streaming.server import Listening, Settings, StorageServer
from holdfast.wire.tls import client_context, make_identity, server_context
from holdfast.worker.snapshot_buffer import SnapshotBuffer, make_memory, new_seal

__all__ = ["main"]

_FILES = 8
_THREADS = 4
"""As `agent.run_storage`."""
_BLOCK_BYTES = 1024 * 1024
_INTO_NOTHING = "a TLS stream into nothing"
_ONE_THREAD = "TLS, received, hashed, written"
_DIRECT = "written directly"
_FROM_MEMORY = "from a neighbour's memory"
_FROM_DRIVER = "from the driver's machine"
_TOKEN = "token"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.stream", description=__doc__)
    parser.add_argument("--size", type=parse_size, default=parse_size("512MiB"), help="of all files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write; a temporary directory")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--give", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.give is not None:
        return asyncio.run(_give(Path(options.give)))
    if options.receive is not None:
        return _receive(Path(options.receive) if options.receive else None)
    scratch = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=options.dir))
    try:
        return _compare(scratch, options.size, options.rounds)
    finally:
        shutil.rmtree(scratch)


def _compare(scratch: Path, size_bytes: int, rounds: int) -> int:
    source = scratch / "source"
    source.mkdir()
    for number in range(_FILES):
        (source / str(number)).write_bytes(os.urandom(size_bytes // _FILES))
    with ExitStack() as stack:
        streamed = stack.enter_context(_storage_server(scratch / "streamed"))
        nothing = stack.enter_context(_receiver(None))
        one_thread = stack.enter_context(_receiver(scratch / "one_thread"))
        direct = PosixStore(scratch / "direct")
        section = Section(
            f"{size_bytes // 1024**2} MiB in {_FILES} files to the driver's machine, durable",
            [
                Contender("streamed", lambda: _upload(streamed, source), after=lambda: _clear(streamed)),
                Contender(_INTO_NOTHING, lambda: _send(nothing, source), note="one connection, nothing is stored"),
                Contender(_ONE_THREAD, lambda: _send(one_thread, source), note="and synced, by one thread"),
                Contender(_DIRECT, lambda: _upload(direct, source), after=lambda: _clear(direct)),
            ],
            [Aim(_INTO_NOTHING, 2.0), Aim(_ONE_THREAD, 0.5)],
        )
        met = print_section(section, race(section, rounds, scratch), size_bytes)
        _compare_restores(scratch, source, size_bytes, rounds)
    print(f"\nload {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    return 0 if met else 1


def _compare_restores(scratch: Path, source: Path, size_bytes: int, rounds: int) -> None:
    """A checkpoint in the driver's directory, and in the memory of another agent."""
    (source / FILE).write_text("{}")
    run = PosixStore(scratch / "run")
    draft = reserve(run, token=_TOKEN)
    manifest = commit(run, draft, upload_part(run, draft, source, rank=0, parent_files=None))
    local = scratch / "local"
    local.mkdir()
    held: list[SnapshotBuffer] = []
    with ExitStack() as stack:
        driver = stack.enter_context(_storage_server(scratch / "run"))
        neighbour = stack.enter_context(_neighbour(source))
        section = Section(
            f"{size_bytes // 1024**2} MiB in {_FILES} files to a node that lacks them, verified",
            [
                Contender(
                    _FROM_MEMORY,
                    lambda: held.append(_fetch(driver, neighbour, manifest.name)),
                    after=lambda: held.pop().close(),
                    note="to memory, as agents do",
                ),
                Contender(
                    _FROM_DRIVER,
                    lambda: fetch_manifest(driver, manifest.name, manifest, local / "checkpoint"),
                    after=lambda: shutil.rmtree(local / "checkpoint"),
                    note="to files, as workers do",
                ),
            ],
        )
        print_section(section, race(section, rounds, scratch), size_bytes)


def _fetch(driver: StreamedStore, neighbour: StreamedStore, name: str) -> SnapshotBuffer:
    """As `agent.run_storage`; the memory is new each time."""
    fetch = SnapshotFetch(name, _TOKEN, {"neighbour": neighbour})
    buffer = SnapshotBuffer(make_memory("holdfast-bench"))
    buffer.reserve(fetch.look(driver, ()))
    fetch.read_into(buffer.data)
    assert fetch.sources.keys() == {"neighbour"}, fetch.problems
    return buffer


@contextmanager
def _neighbour(source: Path) -> Iterator[StreamedStore]:
    """What an agent in a process of its own has in memory."""
    with _started("-m", "bench.stream", "--give", str(source)) as process:
        assert process.stdout is not None
        served = ServedStorage(root="neighbour", host="127.0.0.1", port=int(process.stdout.readline()), key="key")
        store = StreamedStore(served, encrypted=True)
        yield store.sub(_TOKEN)
        store.close()


async def _give(source: Path) -> int:
    """Give a directory's files from memory, as an agent does, until killed."""
    buffers = Buffers(1, SnapshotMemory(1 << 40))
    paths = sorted(source.iterdir())
    room = buffers.make_room(sum(path.stat().st_size for path in paths))
    assert room is not None
    buffer, files, offset = SnapshotBuffer.open(room), list[MemoryFile](), 0
    buffer.reserve(sum(path.stat().st_size for path in paths))
    for path in paths:
        data = path.read_bytes()
        buffer.data[offset : offset + len(data)] = data
        files.append(MemoryFile(path.name, offset, len(data)))
        offset += len(data)
    buffer.seal = seal = new_seal()
    buffers.hold_fetched(Snapshot(buffer=room, seal=seal, files=files), _TOKEN)
    served = ServedSnapshots(buffers, asyncio.get_running_loop())
    server = StorageServer(Settings(key="key", hosts=["127.0.0.1"], encrypted=True), served)
    print(server.port, flush=True)
    await asyncio.Event().wait()
    return 0


def _upload(store: Store, source: Path) -> None:
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda path: store.upload(path.name, path), sorted(source.iterdir())))


def _clear(store: Store) -> None:
    store.delete([entry.key for entry in store.list()])


@contextmanager
def _storage_server(root: Path) -> Iterator[StreamedStore]:
    settings = Settings(root=str(root), key="key", hosts=["127.0.0.1"], encrypted=True)
    with _started("-m", "holdfast.streaming.server") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()
        port = msgspec.json.decode(process.stdout.readline(), type=Listening).port
        served = ServedStorage(root=str(root), host="127.0.0.1", port=port, key="key")
        store = StreamedStore(served, encrypted=True)
        yield store
        store.close()


# ---------------------------------------------------------------- what it is compared with


@contextmanager
def _receiver(root: Path | None) -> Iterator[int]:
    """The port of a process that takes streams, and stores them below `root`, or nowhere."""
    with _started("-m", "bench.stream", "--receive", str(root or "")) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextmanager
def _started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        yield process
        process.kill()


def _send(port: int, source: Path) -> None:
    """Send all files one after the other, and wait until the receiver has them."""
    with socket.create_connection(("127.0.0.1", port)) as plain, client_context().wrap_socket(plain) as connected:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        for path in sorted(source.iterdir()):
            connected.sendall(path.stat().st_size.to_bytes(8, "big"))
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    connected.sendall(buffer[:count])
        connected.sendall((0).to_bytes(8, "big"))
        assert connected.recv(1) == b"."


def _receive(root: Path | None) -> int:
    """Take one stream after the other in one thread, until killed."""
    context = server_context(make_identity())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            plain, _ = listener.accept()
            with plain, context.wrap_socket(plain, server_side=True) as connected:
                number = 0
                while size_bytes := int.from_bytes(_read(connected, 8), "big"):
                    _take_file(connected, size_bytes, None if root is None else root / str(number))
                    number += 1
                connected.sendall(b".")


def _take_file(connected: socket.socket, size_bytes: int, target: Path | None) -> None:
    buffer, hasher = memoryview(bytearray(_BLOCK_BYTES)), blake3()
    if target is None:
        while size_bytes:
            size_bytes -= connected.recv_into(buffer, min(len(buffer), size_bytes))
        return
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    with target.open("xb", buffering=0) as file:
        while size_bytes:
            count = connected.recv_into(buffer, min(len(buffer), size_bytes))
            hasher.update(buffer[:count])
            file.write(buffer[:count])
            size_bytes -= count
        os.fsync(file.fileno())


def _read(connected: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        data += connected.recv(size_bytes - len(data))
    return data


if __name__ == "__main__":
    sys.exit(main())

"""The streamed store: its operations run on the driver's machine, for nodes that do not see the run's storage path.

Each operation takes a connection of its own for as long as it lasts, so several files are transferred at once; a few
are kept for the next operations. The digest of an upload is the server's, of the bytes that it received: nothing is
hashed twice. `server` is the other end; `tests/contract` holds both, over sockets, to the protocol in `storage.store`.
"""

from __future__ import annotations

import errno
import os
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, StorageError, Unavailable, WireError
from holdfast.storage.hashing import size_of
from holdfast.storage.keys import check_key, check_prefix
from holdfast.storage.locate import open_directories_below
from holdfast.storage.retry import RetryingStore
from holdfast.storage.store import Digest, Entry, InMemory, OnBytes, Source
from holdfast.storage.transfer import receive
from holdfast.streaming import messages as m
from holdfast.streaming.connection import BLOCK_BYTES, Connection, dial

__all__ = ["StreamedStore", "open_streamed", "use_streamed"]

_IDLE_MAX = 4
"""Connections that are kept for the next operations."""
_REPLY_TIMEOUT_S = 300.0
"""A server that neither answers nor takes anything for so long stands still: its disk may take a while to write."""
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_replies: msgspec.msgpack.Decoder[m.Reply] = msgspec.msgpack.Decoder(m.Reply)


class _Connections:
    """The connections of a store and its `sub` views."""

    def __init__(self, dial: Callable[[], Connection], timeout_s: float) -> None:
        self._dial = dial
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @contextmanager
    def borrow(self) -> Iterator[Connection]:
        """A connection; it is kept afterwards, unless something was raised."""
        connection = self._find_idle() or self._dial()
        try:
            connection.set_timeout(self._timeout_s)
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _find_idle(self) -> Connection | None:
        if self._pid != os.getpid():  # a forked child must not use the parent's
            self._pid, self._lock = os.getpid(), threading.Lock()
            idle, self._idle = self._idle, []
            for connection in idle:
                connection.forget()
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_idle:
                return connection
            connection.close()  # the server has ended it


class StreamedStore:
    """A Store behind a storage server. Keys are relative to `prefix` below the directory that is served."""

    def __init__(
        self,
        served: m.ServedStorage,
        *,
        encrypted: bool | None = None,
        find_server: Callable[[], m.ServedStorage] | None = None,
        timeout_s: float = _REPLY_TIMEOUT_S,
    ) -> None:
        """`encrypted`: None: unless the server is reached over loopback. `find_server` is asked at each dial, where
        another server may take the place of this one. `timeout_s`: how long the server may send and take nothing."""
        self._served = served
        self._prefix = ""
        self._durable = True

        def connect() -> Connection:
            now = served if find_server is None else find_server()
            return dial(now.host, now.port, now.key, encrypted=encrypted)

        self._connections = _Connections(connect, timeout_s)

    def __repr__(self) -> str:
        return f"StreamedStore({self.uri!r})"

    @property
    def uri(self) -> str:
        return str(Path(self._served.root) / self._prefix)

    @property
    def local_root(self) -> Path | None:
        return None

    @property
    def exclusive(self) -> bool:
        return bool(self._ask(m.IsExclusive()))

    def put(self, key: str, data: bytes) -> None:
        self._ask(m.Put(key=self._encode(key), data=data, durable=self._durable))

    def create(self, key: str, data: bytes) -> None:
        self._ask(m.Create(key=self._encode(key), data=data, durable=self._durable))

    def get(self, key: str) -> bytes:
        return self._read(m.Read(key=self._encode(key)))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._read(m.Read(key=self._encode(key), start=start, length=length))

    def size(self, key: str) -> int:
        return self._stat(key)[0]

    def version(self, key: str) -> str | None:
        return self._stat(key)[1]

    def children(self, prefix: str = "") -> list[str]:
        names: list[bytes] = self._ask(m.Children(prefix=self._encode_prefix(prefix)))
        return [os.fsdecode(name) for name in names]

    def list(self, prefix: str = "") -> list[Entry]:
        above = f"{self._prefix}/" if self._prefix else ""
        found: list[tuple[bytes, int]] = self._ask(m.List(prefix=self._encode_prefix(prefix)))
        return [Entry(os.fsdecode(key).removeprefix(above), size_bytes) for key, size_bytes in found]

    def delete(self, keys: Iterable[str]) -> None:
        self._ask(m.Delete(keys=[self._encode(key) for key in keys]))

    def copy(self, source: str, target: str) -> None:
        self._ask(m.Copy(source=self._encode(source), target=self._encode(target)))

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        mode = None if isinstance(source, InMemory) else source.stat().st_mode & 0o777
        request = m.Receive(key=self._encode(key), size_bytes=size_of(source), mode=mode, durable=self._durable)
        with self._borrow() as connection:
            connection.send(request)
            try:
                connection.send_chunks(source, on_bytes)
            except (InterruptedError, ConnectionError) as error:
                # The server had enough: it has said why, and ends the connection.
                raise self._error(connection.receive(_replies)) from error
            reply = connection.receive(_replies)
            if reply is None or reply.failure is not None:
                raise self._error(reply)
        digest = Digest(*reply.value)
        if isinstance(source, InMemory) and source.digest not in (None, digest):
            raise Unavailable(f"{self._show(key)} did not arrive as it was sent: try again.")
        return digest

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        with self._borrow() as connection:
            connection.send(m.Read(key=self._encode(key)))
            reply = connection.receive(_replies)
            if reply is not None and reply.failure is None:
                size_bytes: int = reply.value
                return receive(_blocks(connection, size_bytes), target, size_bytes, self._show(key), on_bytes)
        raise self._error(reply)

    def read_into(self, key: str, target: memoryview, on_block: Callable[[memoryview], None]) -> None:
        """Fill memory of the file's size with it, and show each block of it that has come; besides the protocol, for
        `agent.snapshot_fetch`."""
        with self._borrow() as connection:
            connection.send(m.Read(key=self._encode(key)))
            reply = connection.receive(_replies)
            if reply is not None and reply.failure is None:
                if reply.value != len(target):
                    raise WireError(f"{self._show(key)} has {reply.value} bytes, not {len(target)}.")
                for start in range(0, len(target), BLOCK_BYTES):
                    block = target[start : start + BLOCK_BYTES]
                    connection.read_exactly(block)
                    on_block(block)
                return
        raise self._error(reply)

    def sub(self, prefix: str) -> StreamedStore:
        view = self._view()
        view._prefix = f"{self._prefix}/{check_key(prefix)}" if self._prefix else check_key(prefix)
        return view

    def volatile(self) -> StreamedStore:
        """A view whose puts, creations and uploads are not fsynced."""
        view = self._view()
        view._durable = False
        return view

    def close(self) -> None:
        """Connections are made again if the store is used again."""
        self._connections.close()

    def _view(self) -> StreamedStore:
        view = StreamedStore(self._served)
        view._prefix, view._durable, view._connections = self._prefix, self._durable, self._connections
        return view

    def _stat(self, key: str) -> tuple[int, str | None]:
        size_bytes, version = self._ask(m.Stat(key=self._encode(key)))
        return size_bytes, version

    def _read(self, request: m.Read) -> bytes:
        with self._borrow() as connection:
            connection.send(request)
            reply = connection.receive(_replies)
            if reply is not None and reply.failure is None:
                data = bytearray(reply.value)
                connection.read_exactly(memoryview(data))
                return bytes(data)
        raise self._error(reply)

    def _ask(self, request: m.Request) -> Any:
        with self._borrow() as connection:
            connection.send(request)
            reply = connection.receive(_replies)
            if reply is not None and reply.failure is None:
                return reply.value
        raise self._error(reply)  # out here: the connection can be used again

    def _error(self, reply: m.Reply | None) -> HoldfastError:
        if reply is None or reply.failure is None:
            return Unavailable(f"The storage server of {self.uri} hung up: try again.")
        return reply.failure.as_error(reply.error, StorageError)

    @contextmanager
    def _borrow(self) -> Iterator[Connection]:
        with self._connections.borrow() as connection:
            try:
                yield connection
            except WireError as error:
                raise Unavailable(f"The connection to the storage server of {self.uri} broke: {error}") from error
            except OSError as error:
                if not _is_of_network(error):
                    raise
                raise Unavailable(f"The connection to the storage server of {self.uri} broke: {error}.") from error

    def _encode(self, key: str) -> bytes:
        check_key(key)
        return os.fsencode(f"{self._prefix}/{key}" if self._prefix else key)

    def _encode_prefix(self, prefix: str) -> bytes:
        check_prefix(prefix)
        return os.fsencode("/".join(part for part in (self._prefix, prefix) if part))

    def _show(self, key: str) -> str:
        return str(Path(self.uri) / key)


def _is_of_network(error: OSError) -> bool:
    """Whether it is the connection that failed, and not the reading of a file that is sent."""
    return isinstance(error, ConnectionError | TimeoutError | ssl.SSLError) or error.errno in _UNREACHABLE


def _blocks(connection: Connection, size_bytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size_bytes, BLOCK_BYTES)))
    while size_bytes:
        block = buffer[:size_bytes]
        connection.read_exactly(block)
        yield block
        size_bytes -= len(block)


def open_streamed(
    served: m.ServedStorage, path: str, find_server: Callable[[], m.ServedStorage] | None = None
) -> RetryingStore:
    """The store of `path`, which is the directory that is served, or lies below it."""
    store = RetryingStore(StreamedStore(served, find_server=find_server))
    below = os.path.relpath(path, served.root)
    return store if below == "." else store.sub(below)


def use_streamed(served: m.ServedStorage) -> None:
    """Let `open_store` find what lies in the served directory there, and not on this machine, from here on."""
    store = RetryingStore(StreamedStore(served))
    open_directories_below(Path(served.root), store)

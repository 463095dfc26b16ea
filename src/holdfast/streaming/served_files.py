"""What a storage server serves: how each request is answered. `server` has the connections and the bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.errors import AccessDenied, StorageError, Unavailable
from holdfast.storage.failures import translated
from holdfast.storage.files import set_mode
from holdfast.storage.posix.store import PosixStore
from holdfast.storage.store import Incoming
from holdfast.streaming import messages as m
from holdfast.streaming.connection import Connection

__all__ = ["OpenedFile", "ServedDirectory", "ServedFiles"]


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """What a `Read` asks for: so many bytes of an open file, which is closed with it."""

    fd: int
    start: int
    size_bytes: int
    is_intact: Callable[[], bool] = lambda: True
    """Asked once all is sent: whether nobody has written to it meanwhile. If not, the connection ends."""

    def close(self) -> None:
        os.close(self.fd)


class ServedFiles(Protocol):
    """What is behind a server. Its methods are called in the threads of connections; a `HoldfastError` is answered."""

    def answer(self, connection: Connection, request: m.Request) -> Any:
        """Carry out any request but `Read`; gives the value of the reply."""
        ...

    def open(self, request: m.Read) -> OpenedFile:
        """Open what is to be sent."""
        ...


class ServedDirectory:
    """A directory, to read and to write; nothing outside it can be named."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._store = PosixStore(root)

    def open(self, request: m.Read) -> OpenedFile:
        path = self._root / self._key_of(request.key)
        self._store.size(os.fsdecode(request.key))  # `NotFound`, if it is no file
        with translated(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        left = max(0, os.fstat(fd).st_size - request.start)
        return OpenedFile(fd, request.start, left if request.length is None else min(left, request.length))

    def answer(self, connection: Connection, request: m.Request) -> Any:
        store = self._store
        match request:
            case m.IsExclusive():
                return store.exclusive
            case m.Put(data=data):
                self._view(request.durable).put(self._key_of(request.key), data)
            case m.Create(data=data):
                self._view(request.durable).create(self._key_of(request.key), data)
            case m.Stat():
                key = self._key_of(request.key)
                return store.size(key), store.version(key)
            case m.Children():
                return [os.fsencode(name) for name in store.children(self._prefix_of(request.prefix))]
            case m.List():
                found = store.list(self._prefix_of(request.prefix))
                return [(os.fsencode(entry.key), entry.size_bytes) for entry in found]
            case m.Delete():
                store.delete([self._key_of(key) for key in request.keys])
            case m.Copy():
                store.copy(self._key_of(request.source), self._key_of(request.target))
            case m.Receive():
                return self._receive(connection, request)
            case _:
                raise StorageError(f"{type(request).__name__} is no request of this version.")
        return None

    def _receive(self, connection: Connection, request: m.Receive) -> tuple[int, str]:
        key, is_over = self._key_of(request.key), False

        def readinto(target: memoryview) -> int:
            nonlocal is_over
            if is_over:  # the directory was removed meanwhile, and what came is lost with it
                raise Unavailable(f"{self._root / key} was removed while it was written: try again.")
            count = connection.read_chunks(target)
            is_over = count == 0
            return count

        mode = 0o666 if request.mode is None else request.mode | 0o400
        digest = self._view(request.durable).receive(key, Incoming(readinto, request.size_bytes, mode))
        if request.mode is not None:
            path = self._root / key
            with translated(path):
                set_mode(path, mode)
        return digest

    def _view(self, durable: bool) -> PosixStore:
        return self._store if durable else self._store.volatile()

    def _key_of(self, name: bytes) -> str:
        """The key, which the store checks for parts such as `..`; it must not lead out of the directory by a symbolic
        link either."""
        key = os.fsdecode(name)
        if not os.path.realpath(self._root / key.lstrip("/")).startswith(f"{os.path.realpath(self._root)}/"):
            raise AccessDenied(f"{key} leads out of {self._root}, which is all that is served here.")
        return key

    def _prefix_of(self, name: bytes) -> str:
        return self._key_of(name) if name else ""

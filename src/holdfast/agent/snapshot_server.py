"""Gives other nodes of the run what this one has in memory of its committed checkpoints.

The storage server (`streaming.server`) with the run's snapshots behind it: they can be listed and read, nothing else.
It works in threads; only to find a buffer they ask the event loop. A buffer is not kept from its worker while it is
sent: the seal shows that it was used again, the connection ends then, and whoever reads compares hashes anyway
(`snapshot_fetch`). Run only where nodes do not share the run's storage.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from concurrent.futures import CancelledError
from io import FileIO
from typing import Any, TypeVar

from holdfast.agent.buffers import Buffers
from holdfast.errors import AccessDenied, CheckpointError, Unavailable
from holdfast.streaming import messages as m
from holdfast.streaming.connection import Connection
from holdfast.streaming.served_files import OpenedFile
from holdfast.streaming.server import Settings, StorageServer
from holdfast.worker.snapshot_buffer import read_seal

__all__ = ["ServedSnapshots", "serve_snapshots"]

_ANSWER_S = 10.0
"""An event loop that does not come to a question for so long has other troubles."""
_T = TypeVar("_T")


class ServedSnapshots:
    """The snapshots of one run; a key is a checkpoint's token and a file's path."""

    def __init__(self, buffers: Buffers, loop: asyncio.AbstractEventLoop) -> None:
        self._buffers = buffers
        self._loop = loop

    def answer(self, connection: Connection, request: m.Request) -> Any:
        if not isinstance(request, m.List):
            raise AccessDenied("What an agent has in memory can be listed and read, nothing else.")
        token = os.fsdecode(request.prefix)
        files = self._ask(lambda: self._buffers.stored_files(token))
        return [(os.fsencode(f"{token}/{path}"), size_bytes) for path, size_bytes in files.items()]

    def open(self, request: m.Read) -> OpenedFile:
        token, _, path = os.fsdecode(request.key).partition("/")
        file, start, size_bytes, seal = self._ask(lambda: self._find(token, path))
        with file:
            fd = os.dup(file.fileno())
        begin = min(request.start, size_bytes)
        left = size_bytes - begin
        length = left if request.length is None else min(left, request.length)
        return OpenedFile(fd, start + begin, length, lambda: read_seal(fd) == seal)

    def _find(self, token: str, path: str) -> tuple[FileIO, int, int, int]:
        """As `Buffers.open_file`, but closed if nobody takes the answer, since it comes too late."""
        fd, start, size_bytes, seal = self._buffers.open_file(token, path)
        return FileIO(fd), start, size_bytes, seal

    def _ask(self, question: Callable[[], _T]) -> _T:
        """Have the event loop, whose the buffers are, answer."""

        async def answer() -> _T:
            return question()

        asked = answer()
        try:
            answered = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError as error:
            asked.close()
            raise Unavailable("The agent has ended.") from error
        try:
            return answered.result(_ANSWER_S)
        except (TimeoutError, CancelledError) as error:
            answered.cancel()
            raise Unavailable("The agent is ending, or has too much to do.") from error
        except OSError as error:
            raise CheckpointError(f"A snapshot cannot be opened: {error}.") from error


def serve_snapshots(files: ServedSnapshots, address: str, key: str) -> StorageServer:
    """Listen where other nodes reach this one. May block, and raises `OSError` or `HoldfastError`."""
    try:
        return StorageServer(Settings(key=key, hosts=[address]), files)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # As with MASTER_PORT: others reach this machine at an address that it does not have itself.
        return StorageServer(Settings(key=key, hosts=["::" if ":" in address else ""]), files)

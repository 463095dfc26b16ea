"""Where a view's bytes go: appended to a file, or gathered beside and put whole, now and then, into an object store.

What is to be done is queued and survives a storage that fails for a while: `sync` goes on where it stopped. A FUSE
mount counts as an object store, since it shows a file only once it is closed and then sends all of it again.
Neighbours: `results` queues, `rows` and `tfevents` made the bytes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from holdfast.errors import NotFound
from holdfast.storage.failures import translated
from holdfast.storage.files import landing, mount_kind, write_all
from holdfast.storage.store import Store

__all__ = ["FileSink", "MirrorSink", "Rewrite", "Sink", "Tail", "open_sink"]

_BLOCK_BYTES = 1 << 20
_PAUSE_S = 10.0
_BYTES_A_SECOND = 100_000

Rewrite = Callable[[Iterator[bytes]], Iterable[bytes]]
"""From the lines of a file to what shall stand there instead."""


class Tail(NamedTuple):
    """What a file holds already: how many lines, the first and the last of them."""

    lines: int
    first: bytes
    last: bytes


class FileSink:
    """A plain file, appended to. It is opened anew for each write, so that other hosts see what is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: deque[bytes | int | Rewrite] = deque()

    def append(self, data: bytes) -> None:
        if data:
            self._queue.append(data)

    def keep_lines(self, count: int) -> None:
        """Cut off what comes after the first `count` lines."""
        self._queue.append(count)

    def rewrite(self, change: Rewrite) -> None:
        """Put other lines in the place of those that are there; readers see the old or the new ones."""
        self._queue.append(change)

    def sync(self, final: bool = False) -> None:
        """Do all that is queued; a `StorageError` leaves the rest for the next call."""
        while self._queue:
            todo = self._queue[0]
            if isinstance(todo, bytes):
                self._append(todo)
            elif isinstance(todo, int):
                self._cut(todo)
            else:
                self.replace(todo(self._lines()))
            self._queue.popleft()

    def replace(self, blocks: Iterable[bytes]) -> None:
        """Let the file consist of these blocks, at once."""
        with landing(self._path) as file, translated(self._path):
            for block in blocks:
                write_all(file.fileno(), block)

    def tail(self) -> Tail | None:
        """What is there; None if there is nothing, or if the last line is torn."""
        lines, first, last = 0, b"", b""
        for line in self._lines():
            first = first or line
            last = line
            lines += 1
        return Tail(lines, first, last) if last.endswith(b"\n") else None

    def close(self) -> None:
        """Nothing is kept open."""

    def _append(self, data: bytes) -> None:
        with translated(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[os.write(fd, rest) :]
            finally:
                self._queue[0] = bytes(rest)  # a full disk may have taken a part
                os.close(fd)

    def _cut(self, count: int) -> None:
        with translated(self._path), suppress(FileNotFoundError), self._path.open("r+b", buffering=0) as file:
            file.truncate(_line_end(file, count))

    def _lines(self) -> Iterator[bytes]:
        with translated(self._path), suppress(FileNotFoundError), self._path.open("rb", _BLOCK_BYTES) as file:
            yield from file


class MirrorSink(FileSink):
    """Gathered in a nameless local file and put into the store whole, so rarely that no more than some 100 kB a
    second go there in the long run, however large the object grows."""

    def __init__(self, store: Store, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  without a name: nothing is left behind, however we end
        super().__init__(_open_path(self._file))
        self._store, self._key, self._clock = store, key, clock
        self._due_at = float("-inf")
        self._dirty = False

    def sync(self, final: bool = False) -> None:
        self._dirty = self._dirty or bool(self._queue)
        super().sync(final)
        if self._dirty and (final or self._clock() >= self._due_at):
            size_bytes = self._size_bytes()
            self._due_at = self._clock() + _PAUSE_S + size_bytes / _BYTES_A_SECOND
            self._store.upload(self._key, self._path)
            self._dirty = False

    def replace(self, blocks: Iterable[bytes]) -> None:
        file = tempfile.TemporaryFile()  # noqa: SIM115
        with translated(self._key):
            for block in blocks:
                write_all(file.fileno(), block)
        self._file.close()
        self._file, self._path = file, _open_path(file)
        self._dirty = True

    def same_as_stored(self) -> bool:
        """Whether the store holds as many bytes already; they are then taken to be these, and not put again."""
        try:
            same = self._store.size(self._key) == self._size_bytes()
        except NotFound:
            return False
        self._dirty = self._dirty and not same
        return same

    def tail(self) -> Tail | None:
        """Nothing: fetching the object would cost more than making it again."""
        return None

    def close(self) -> None:
        self._file.close()

    def _size_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size


Sink = FileSink | MirrorSink


def open_sink(store: Store, key: str, clock: Callable[[], float] = time.monotonic) -> Sink:
    """The right kind for this store."""
    root = store.local_root
    return (
        MirrorSink(store, key, clock) if root is None or mount_kind(root).startswith("fuse") else FileSink(root / key)
    )


def _open_path(file: BinaryIO) -> Path:
    return Path(f"/proc/self/fd/{file.fileno()}")


def _line_end(file: BinaryIO, count: int) -> int:
    """Where the `count`-th line of the file ends, or the file does."""
    offset = 0
    while count > 0 and (block := file.read(_BLOCK_BYTES)):
        newlines = block.count(b"\n")
        if newlines < count:
            count -= newlines
            offset += len(block)
            continue
        end = -1
        for _ in range(count):
            end = block.index(b"\n", end + 1)
        return offset + end + 1
    return offset

"""Where a view's bytes go: appended to a file, or gathered beside and put whole, now and then, into an object store.

What is to be done is queued and survives a storage that fails for a while: `sync` goes on where it stopped. A FUSE
mount counts as an object store, since it shows a file only once it is closed and then sends all of it again.

Each controller writes to a file of its own, which takes the old one's place by a rename: a controller that was fenced
while it slept appends to a file that nobody sees any more. Where there is none yet, the name is linked, which replaces
nothing. Only renames and uploads can harm a successor's file, and right before each the fence is looked at; in doubt
nothing is written. Neighbours: `results` queues, `rows` and
`tfevents` made the bytes.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from holdfast.errors import Fenced, NotFound
from holdfast.storage.failures import translated
from holdfast.storage.files import mount_kind, write_all
from holdfast.storage.keys import new_temporary
from holdfast.storage.posix.atomic_file import AtomicFile, link_open_file
from holdfast.storage.retry import without_retries
from holdfast.storage.store import Store

__all__ = ["FileSink", "MirrorSink", "Rewrite", "SavedFile", "Sink", "can_append", "open_sinks"]

_BLOCK_BYTES = 1 << 20
_TAIL_BYTES = 4096
_PUT_BYTES = 8 << 20
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC

Rewrite = Callable[[Iterator[bytes]], Iterable[bytes]]
"""From the lines of a file to what shall stand there instead."""


class SavedFile(msgspec.Struct, frozen=True):
    """A file as it was left: its size, and a checksum of its last bytes, by which it is known again."""

    size_bytes: int = 0
    crc: int = 0


class _OwnFile:
    """A file that only this controller writes to, whatever happens to its name."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._fd = -1
        self._queue: deque[bytes | int | Rewrite] = deque()
        self._is_empty = False
        """Nothing was written since `start_over`."""

    @property
    def pending(self) -> bool:
        """Whether something is queued that could not be done yet."""
        return bool(self._queue)

    def append(self, data: bytes) -> None:
        if data:
            self._queue.append(data)

    def drop_lines(self, count: int) -> None:
        """Cut off the last `count` lines."""
        self._queue.append(count)

    def rewrite(self, change: Rewrite) -> None:
        """Put other lines in the place of those that are there."""
        queued = [one for one in self._queue if isinstance(one, bytes)]
        if self._is_empty and len(queued) == len(self._queue):
            lines = b"".join(queued).splitlines(keepends=True)
            self._queue = deque([b"".join(change(iter(lines)))])
        else:
            self._queue.append(change)

    def start_over(self) -> None:
        """Begin with an empty file."""
        self._queue.clear()
        self._exchange(self._make())
        self._is_empty = True

    def saved(self) -> SavedFile:
        """What is there at present."""
        size_bytes = os.fstat(self._fd).st_size
        return SavedFile(size_bytes, self._tail_crc(self._fd, size_bytes))

    def write(self) -> None:
        """Do all that is queued; a `StorageError` leaves the rest for the next call."""
        while self._queue:
            todo = self._queue[0]
            self._is_empty = False
            with translated(self._key):
                if isinstance(todo, bytes):
                    self._append(todo)
                elif isinstance(todo, int):
                    os.ftruncate(self._fd, self._line_start(todo))
                else:
                    self._change(todo)
            self._queue.popleft()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _make(self) -> int:
        """A new, empty file, open for appending."""
        raise NotImplementedError

    def _exchange(self, fd: int) -> None:
        old, self._fd = self._fd, fd
        if old >= 0:
            os.close(old)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        finally:
            self._queue[0] = bytes(rest)  # a full disk may have taken a part

    def _change(self, change: Rewrite) -> None:
        new = self._make()
        try:
            for block in change(self._lines()):
                write_all(new, block)
        except BaseException:
            os.close(new)
            raise
        self._exchange(new)

    def _lines(self) -> Iterator[bytes]:
        with Path(f"/proc/self/fd/{self._fd}").open("rb", _BLOCK_BYTES) as file:
            yield from file

    def _line_start(self, count: int) -> int:
        """Where the last `count` lines begin."""
        end = os.fstat(self._fd).st_size
        while end > 0:
            start = max(0, end - _BLOCK_BYTES)
            block = os.pread(self._fd, end - start, start)
            place = len(block)
            while (place := block.rfind(b"\n", 0, place)) >= 0:
                if count == 0:
                    return start + place + 1
                count -= 1
            end = start
        return 0

    def _take_prefix(self, source: int, saved: SavedFile) -> bool:
        """Begin with the first bytes of another open file, if they are those that were left."""
        if os.fstat(source).st_size < saved.size_bytes or self._tail_crc(source, saved.size_bytes) != saved.crc:
            return False
        self.start_over()
        done = 0
        while done < saved.size_bytes and (block := os.pread(source, min(_BLOCK_BYTES, saved.size_bytes - done), done)):
            write_all(self._fd, block)
            done += len(block)
        return self.saved() == saved

    @staticmethod
    def _tail_crc(fd: int, size_bytes: int) -> int:
        start = max(0, size_bytes - _TAIL_BYTES)
        return crc32(os.pread(fd, size_bytes - start, start))


class FileSink(_OwnFile):
    """A plain file. Until the first `sync` it has no name, or a temporary's; afterwards its name is watched."""

    def __init__(self, path: Path, fenced: Callable[[], bool]) -> None:
        super().__init__(str(path))
        self._path = path
        self._directory = str(path.parent)
        self._fenced = fenced
        self._temporary: Path | None = None
        self._waits = False
        """The file in use is not yet under its name."""
        self._installed = False

    def resume(self, saved: SavedFile) -> bool:
        """Go on from what an earlier controller left; False if it is not there any more."""
        try:
            with translated(self._key), self._path.open("rb", 0) as file:
                return self._take_prefix(file.fileno(), saved)
        except NotFound:
            return False

    def sync(self) -> None:
        """Write what is queued, and let the file be seen under its name; `Fenced` if that is another controller's by
        now."""
        self.write()
        if self._waits:
            self._install()
        else:
            self._keep_name()

    def _install(self) -> None:
        with translated(self._key):
            if self._temporary is not None or not self._link(self._path.name):
                if self._fenced():
                    raise Fenced(f"{self._path} is another controller's by now.")
                if self._temporary is None and self._link(name := new_temporary()):
                    self._temporary = self._path.parent / name
                assert self._temporary is not None
                self._temporary.replace(self._path)
        self._temporary, self._waits, self._installed = None, False, True

    def close(self) -> None:
        super().close()
        self._discard()

    def _keep_name(self) -> None:
        """Put the file back under its name if somebody removed or replaced it."""
        with translated(self._key):
            mine = os.fstat(self._fd)
            try:
                there = self._path.stat()
            except FileNotFoundError:
                there = None
            if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
                self._change(lambda lines: lines)
                self._install()

    def _change(self, change: Rewrite) -> None:
        try:
            super()._change(change)
        except BaseException:
            self._discard()
            self._waits = not self._installed  # or the half of it would be installed
            raise

    def _make(self) -> int:
        self._discard()
        self._waits = True
        with translated(self._key):
            if AtomicFile.unnamed:
                with suppress(OSError):  # not on this filesystem, or there is no directory yet
                    return self._make_unnamed()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if AtomicFile.unnamed:
                with suppress(OSError):
                    return self._make_unnamed()
            self._temporary = self._path.parent / new_temporary()
            return os.open(self._temporary, os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)

    def _make_unnamed(self) -> int:
        return os.open(self._directory, os.O_TMPFILE | _FLAGS, 0o666)

    def _link(self, name: str) -> bool:
        """Give a nameless file a name that nothing has; False if something has it, or that cannot be done here."""
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            link_open_file(self._fd, name, directory)
        except FileExistsError:
            return False
        except OSError:  # not in this sandbox: from now on files have names from the beginning
            AtomicFile.unnamed = False
            self._change(lambda lines: lines)
            return False
        finally:
            os.close(directory)
        return True

    def _discard(self) -> None:
        if self._temporary is not None:
            with suppress(OSError):
                self._temporary.unlink()
            self._temporary = None


class MirrorSink(_OwnFile):
    """Gathered in a nameless local file, which `upload` puts into the store whole."""

    def __init__(self, store: Store, key: str, fenced: Callable[[], bool]) -> None:
        super().__init__(key)
        self._store = store
        self._once = without_retries(store)
        self._fenced = fenced
        self._sent: SavedFile | None = None
        self._version: str | None = None

    def resume(self, saved: SavedFile) -> bool:
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory, "copy")
            try:
                self._store.download(self._key, copy)
            except NotFound:
                return False
            with copy.open("rb", 0) as file, translated(self._key):
                if not self._take_prefix(file.fileno(), saved):
                    return False
                if os.fstat(file.fileno()).st_size == saved.size_bytes:
                    self._sent = saved
                return True

    def sync(self) -> None:
        """Write what is queued; nothing is seen before it is uploaded."""
        self.write()

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def dirty(self) -> bool:
        return self._sent != self.saved()

    def upload(self) -> None:
        """Put the whole object, in one try: who tries again looks at the fence first. `Fenced` if in doubt."""
        if self._fenced():
            raise Fenced(f"{self._store.uri}/{self._key} may be another controller's by now.")
        sending = self.saved()
        if sending.size_bytes <= _PUT_BYTES:
            self._once.put(self._key, os.pread(self._fd, sending.size_bytes, 0))
        else:
            self._once.upload(self._key, Path(f"/proc/self/fd/{self._fd}"))
        self._sent = sending
        self._version = self._stored_version()

    def mend(self) -> None:
        """See to it that it is sent again if what is stored is not what was sent: a fenced controller's request may
        have come late."""
        if self._version is None or self._stored_version() != self._version:
            self._sent = None

    def _stored_version(self) -> str | None:
        try:
            return self._store.version(self._key)
        except NotFound:
            return None

    def _make(self) -> int:
        # Without a name: nothing is left behind, however we end.
        with tempfile.TemporaryFile(buffering=0) as file:
            fd = os.dup(file.fileno())
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
        return fd


Sink = FileSink | MirrorSink


def can_append(store: Store) -> bool:
    """Whether files of this store, and of those below it, can be written line by line."""
    root = store.local_root
    return root is not None and not mount_kind(root).startswith("fuse")


def open_sinks(store: Store, keys: Sequence[str], fenced: Callable[[], bool], *, appends: bool) -> list[Sink]:
    """One for each key, of the right kind for this store; `appends` is what `can_append` says of it."""
    root = store.local_root
    if root is None or not appends:
        return [MirrorSink(store, key, fenced) for key in keys]
    return [FileSink(root / key, fenced) for key in keys]

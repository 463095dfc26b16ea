"""The writing end of a journal: the records of one lease's runs, as lines in segments under keys that nobody else uses.

A segment is `journal/<epoch>-<lease>-<first>[-<last>].jsonl`, named by the numbers of its records. Where files can be
appended to, one grows to `FILE_SEGMENT_BYTES`, and one fdatasync makes a batch durable. Elsewhere each flush creates
a segment of its own that is never changed: a delayed or repeated request can only write the same bytes again. Small
segments are merged, at commits, into one whose name says which records it holds, so that a small one that turns up
late is known to hold nothing new. `format` has the lines, `reader` the other end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.core.records import CheckpointCommitted, Record
from holdfast.errors import StorageError
from holdfast.journal.format import DIRECTORY, encode_header, encode_line, segment_key
from holdfast.storage.failures import translated
from holdfast.storage.files import mount_kind, preallocate, write_all
from holdfast.storage.store import Store

__all__ = ["FILE_SEGMENT_BYTES", "SEGMENT_BYTES", "Journal"]

SEGMENT_BYTES = 256 * 1024
FILE_SEGMENT_BYTES = 4 * 1024 * 1024
_MERGE_AT_COMMIT = 8
_MERGE_ALWAYS = 64
"""So many small segments are merged at a commit, or whenever there are."""
_SPARE_BYTES = 32 * 1024
"""So much room is set aside for records, where files are appended to."""
_log = logging.getLogger(__name__)


class _SegmentPart(NamedTuple):
    """A segment that may still be merged with others."""

    key: str
    first: int
    last: int
    lines: bytes


class Journal:
    """One lease's journal, for any number of runs. `append` is cheap; `flush` makes all that was appended durable.

    One flush at a time; appending meanwhile, from the controllers' thread, is fine.
    """

    def __init__(self, store: Store, epoch: int, lease: str) -> None:
        """`lease` is the random id of the lease."""
        self.store, self.epoch, self.lease = store, epoch, lease
        self.on_loss: Callable[[], None] | None = None
        """Called when segments of this journal turned out to be gone from storage."""
        self.appended = 0
        """Number of the last record that was appended."""
        self.saved = 0
        """Number of the last record that is durable."""
        self._unsaved: list[bytes] = []
        self._commits = False
        root = store.local_root
        if root is not None and not mount_kind(root).startswith("fuse"):
            self._writer: _FileWriter | _ObjectWriter = _FileWriter(store, root, epoch, lease)
        else:
            self._writer = _ObjectWriter(store, epoch, lease)

    def append(self, records: Sequence[Record], run: str = "") -> None:
        """`run` is the id of the run that the records are of."""
        for record in records:
            self.appended += 1
            self._unsaved.append(encode_line(record, self.appended, run))
            if isinstance(record, CheckpointCommitted):
                self._commits = True

    def flush(self) -> None:
        """Raises `StorageError`; what was appended is then kept, for the next try."""
        if not self._unsaved:
            return
        commits, self._commits = self._commits, False
        try:
            count = self._writer.write(self._unsaved, self.saved + 1)
        except StorageError:
            self._commits = commits
            raise
        del self._unsaved[:count]
        self.saved += count
        if not self._writer.check(commits):
            self._tell_loss()

    def close(self) -> None:
        """Leave the journal tidy; never fails, since all of it is durable already."""
        try:
            if not self._writer.check(commits=True):
                self._tell_loss()
        except StorageError as error:
            _log.info("The journal could not be looked at once more: %s", error)
        self._writer.close()

    def _tell_loss(self) -> None:
        if self.on_loss is not None:
            self.on_loss()


class _FileWriter:
    """Appends to plain files."""

    def __init__(self, store: Store, root: Path, epoch: int, lease: str) -> None:
        self._store, self._root = store, root
        self._epoch, self._lease = epoch, lease
        self._key = ""
        self._fd: int | None = None
        self._size_bytes = 0
        self._allocated_bytes = 0
        """How far blocks are set aside; beyond the size, as far as that worked."""
        self._before: Path | None = None
        """The segment that was filled before this one."""
        self._lost = False

    def write(self, unsaved: list[bytes], first: int) -> int:
        """Append these lines, of which the first has this number; how many it were."""
        count = len(unsaved)
        data = b"".join(unsaved[:count])
        if self._fd is not None and self._is_gone():
            self._write_again()
        if self._fd is None:
            self._key = segment_key(self._epoch, self._lease, first)
            header = encode_header(self._epoch, self._lease)
            if self._before is not None and not self._before.exists():
                self._tell_loss()
            self._store.put(self._key, header + data)  # through the store, so that the directories are durable
            self._open(len(header) + len(data))
            return count
        assert self._fd is not None
        with translated(self._root / self._key):
            try:
                write_all(self._fd, data)
                os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, self._size_bytes)  # no torn line in the middle when this is tried again
                self._allocated_bytes = 0
                raise
        self._size_bytes += len(data)
        self._allocate()
        if self._size_bytes >= FILE_SEGMENT_BYTES:
            self._before = self._root / self._key
            self.close()
        return count

    def check(self, commits: bool) -> bool:
        """False if segments were found to be gone since this was last asked."""
        if commits and self._fd is not None and self._is_gone():
            self._write_again()
        lost, self._lost = self._lost, False
        return not lost

    def close(self) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size)  # gives back what was set aside and not needed
            os.close(self._fd)
            self._fd = None

    def _allocate(self) -> None:
        """Keep room for the next records. On a disk that is full retention can make room, but only what is durable is
        acted upon."""
        assert self._fd is not None
        if self._allocated_bytes < self._size_bytes + _SPARE_BYTES // 2:
            wanted_bytes = self._size_bytes + _SPARE_BYTES
            self._allocated_bytes = wanted_bytes if preallocate(self._fd, wanted_bytes) else 0

    def _open(self, size_bytes: int) -> None:
        path = self._root / self._key
        with translated(path):
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._size_bytes, self._allocated_bytes = size_bytes, 0
        self._allocate()

    def _is_gone(self) -> bool:
        """Whether the open file is no longer what lies under its name: somebody removed or replaced it."""
        assert self._fd is not None
        path = self._root / self._key
        with translated(path):
            mine = os.fstat(self._fd)
            try:
                there = path.stat()
            except FileNotFoundError:
                return True
            return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def _write_again(self) -> None:
        """The kernel keeps an open file that was removed: what it holds is put back under its name."""
        assert self._fd is not None
        with translated(self._root / self._key):
            data = os.pread(self._fd, self._size_bytes, 0)
        self._store.put(self._key, data)
        self.close()
        self._open(len(data))
        self._tell_loss()

    def _tell_loss(self) -> None:
        self._lost = True
        _log.error(
            "%s/%s was removed while the run goes on. The segment in use is written again; what was in earlier ones is "
            "lost. Checkpoints and the run's state are not harmed.",
            self._store.uri,
            DIRECTORY,
        )


class _ObjectWriter:
    """Creates a segment at each flush, and merges small ones."""

    def __init__(self, store: Store, epoch: int, lease: str) -> None:
        self._store = store
        self._epoch, self._lease = epoch, lease
        self._header = encode_header(epoch, lease)
        self._attempt: _SegmentPart | None = None
        """What was tried and may have arrived: only the very same bytes may be put under that key."""
        self._parts: list[_SegmentPart] = []
        self._done: list[str] = []
        """Keys of segments that are as large as they get."""
        self._strays: list[str] = []
        """Merged segments that could not be deleted yet."""

    def write(self, unsaved: list[bytes], first: int) -> int:
        if self._attempt is None:
            lines = b"".join(unsaved[: (count := len(unsaved))])
            last = first + count - 1
            self._attempt = _SegmentPart(segment_key(self._epoch, self._lease, first, last), first, last, lines)
        part = self._attempt
        self._store.put(part.key, self._header + part.lines)
        self._attempt = None
        self._parts.append(part)
        return part.last - part.first + 1

    def check(self, commits: bool) -> bool:
        """Merge where it is worth it. False if segments were found to be gone."""
        try:
            whole = not commits or self._mend()
            size_bytes = sum(len(part.lines) for part in self._parts)
            least = _MERGE_AT_COMMIT if commits else _MERGE_ALWAYS
            if len(self._parts) >= least or (len(self._parts) > 1 and size_bytes >= SEGMENT_BYTES):
                self._merge()
        except StorageError as error:
            _log.info("The journal's segments could not be merged this time: %s", error)
            return True
        return whole

    def close(self) -> None:
        """Nothing is kept open."""

    def _merge(self) -> None:
        first, last = self._parts[0].first, self._parts[-1].last
        lines = b"".join(part.lines for part in self._parts)
        merged = _SegmentPart(segment_key(self._epoch, self._lease, first, last), first, last, lines)
        self._store.put(merged.key, self._header + lines)
        self._strays += [part.key for part in self._parts]
        self._parts = [merged]
        if len(lines) >= SEGMENT_BYTES:
            self._done.append(merged.key)
            self._parts = []
        self._store.delete(self._strays)  # readers take the merged one from here on, whether these go or not
        self._strays = []

    def _mend(self) -> bool:
        """Put back what was removed, as far as it is remembered; False if anything was."""
        there = {entry.key for entry in self._store.list(DIRECTORY)}
        gone = [part for part in self._parts if part.key not in there]
        lost = [key for key in self._done if key not in there]
        for part in gone:
            self._store.put(part.key, self._header + part.lines)
        self._done = [key for key in self._done if key in there]
        if gone or lost:
            _log.error(
                "%s/%s was removed while the run goes on. The newest segments are written again; %d earlier ones are "
                "lost. Checkpoints and the run's state are not harmed.",
                self._store.uri,
                DIRECTORY,
                len(lost),
            )
        return not (gone or lost)

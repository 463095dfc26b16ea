"""The journal: a run's records as lines of JSON in segments, appended and never rewritten by a later controller.

A segment is `journal/<epoch>-<number>.jsonl`. Where files can be appended to, one fdatasync makes a batch durable; an
object store's open segment is put again whole until it has grown to `SEGMENT_BYTES`, then the next one begins.
`read_records` gives back what counts: a torn last line is dropped, and so is what a fenced controller wrote
after its successor had read the journal (the successor's epoch file, written by `lease`, says how far it had read).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from holdfast.core.floats import tag_floats, untag_floats
from holdfast.core.records import CheckpointCommitted, Record, Reported, RunFinished
from holdfast.errors import StorageError
from holdfast.storage.failures import translated
from holdfast.storage.files import mount_kind
from holdfast.storage.store import Entry, Store

__all__ = ["SEGMENT_BYTES", "Journal", "Position", "decode_lines", "encode_line", "position", "read_records"]

SEGMENT_BYTES = 256 * 1024
_FILE_SEGMENT_BYTES = 16 * 1024 * 1024
_DIRECTORY = "journal"
_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Position(msgspec.Struct, frozen=True):
    """How far a journal was read: everything up to `size_bytes` of the segment `key`."""

    key: str = ""
    size_bytes: int = 0


def encode_line(record: Record) -> bytes:
    """One record as it stands in the journal, newline included."""
    if isinstance(record, Reported | CheckpointCommitted):
        record = msgspec.structs.replace(record, metrics=tag_floats(record.metrics))
    elif isinstance(record, RunFinished):
        record = msgspec.structs.replace(record, return_value=tag_floats(record.return_value))
    return _encoder.encode(record) + b"\n"


def decode_lines(data: bytes, where: str) -> list[Record]:
    """Every whole line. A torn last line was never acted upon; a line that makes no sense is skipped, loudly."""
    found: list[Record] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            record = _decoder.decode(line)
        except msgspec.MsgspecError as error:
            _log.warning("%s, line %d is damaged and is left out (%s).", where, number, error)
            continue
        if isinstance(record, Reported | CheckpointCommitted):
            record = msgspec.structs.replace(record, metrics=untag_floats(record.metrics))
        elif isinstance(record, RunFinished):
            record = msgspec.structs.replace(record, return_value=untag_floats(record.return_value))
        found.append(record)
    return found


def position(store: Store) -> Position:
    """The journal's present end."""
    entries = _segments(store)
    return Position(entries[-1].key, entries[-1].size_bytes) if entries else Position()


def read_records(store: Store, cuts: Sequence[tuple[int, Position]] = ()) -> list[Record]:
    """Every record that counts, in order. `cuts` are (epoch, position) pairs: what earlier epochs wrote beyond the
    position came after that epoch's controller had taken over."""
    entries = [kept for entry in _segments(store) if (kept := _cut(entry, cuts)) is not None]

    def read(entry: Entry) -> list[Record]:
        return decode_lines(store.get(entry.key)[: entry.size_bytes], f"{store.uri}/{entry.key}")

    if len(entries) < 2 or store.local_root is not None:
        return [record for entry in entries for record in read(entry)]
    with ThreadPoolExecutor(min(16, len(entries)), "journal") as pool:
        return [record for part in pool.map(read, entries) for record in part]


def _segments(store: Store) -> list[Entry]:
    return [entry for entry in store.list(_DIRECTORY) if entry.key.endswith(".jsonl")]


def _cut(entry: Entry, cuts: Sequence[tuple[int, Position]]) -> Entry | None:
    epoch = int(entry.key.removeprefix(_DIRECTORY + "/").partition("-")[0])
    size_bytes = entry.size_bytes
    for later, end in cuts:
        if epoch >= later:
            continue
        if entry.key > end.key:
            return None
        if entry.key == end.key:
            size_bytes = min(size_bytes, end.size_bytes)
    return Entry(entry.key, size_bytes)


class Journal:
    """The writing end, one controller's own. `append` is cheap; `flush` makes all that was appended durable.

    One flush at a time; appending meanwhile, from the controller's thread, is fine.
    """

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._number = 0
        self._unsaved: list[bytes] = []
        self._segment = b""
        self._segment_bytes = 0
        self._fd: int | None = None
        root = store.local_root
        self._appends = root is not None and not mount_kind(root).startswith("fuse")

    @property
    def quick(self) -> bool:
        """Whether a flush is a local append, short enough to wait for on the spot."""
        return self._appends

    @property
    def dirty(self) -> bool:
        return bool(self._unsaved)

    def append(self, records: Sequence[Record]) -> None:
        self._unsaved.extend(map(encode_line, records))

    def flush(self) -> None:
        """Raises `StorageError`; what was appended is then kept, for the next try."""
        count = len(self._unsaved)
        data = b"".join(self._unsaved[:count])
        if not data:
            return
        if self._appends:
            self._append_to_file(data)
        else:
            self._segment += data
            try:
                self._store.put(self._key(), self._segment)
            except StorageError:
                self._segment = self._segment[: -len(data)]
                raise
            if len(self._segment) >= SEGMENT_BYTES:
                self._segment = b""
                self._number += 1
        del self._unsaved[:count]

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _key(self) -> str:
        return f"{_DIRECTORY}/{self._epoch:06d}-{self._number:06d}.jsonl"

    def _append_to_file(self, data: bytes) -> None:
        root = self._store.local_root
        assert root is not None
        path = root / self._key()
        if self._fd is None:
            self._store.create(self._key(), b"")  # through the store, so that the directories are durable
            with translated(path):
                self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._segment_bytes = 0
        with translated(path):
            written = 0
            try:
                while written < len(data):
                    written += os.write(self._fd, data[written:])
                os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, self._segment_bytes)  # no torn line in the middle when this is tried again
                raise
        self._segment_bytes += len(data)
        if self._segment_bytes >= _FILE_SEGMENT_BYTES:
            self.close()
            self._number += 1

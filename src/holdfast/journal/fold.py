"""The fold: a run's summary beside its journal, so that a new controller reads that and the records after it.

`journal/<epoch>-<lease>.fold.json` is written by its own lease only, now and then at commits, after the records that it
covers are durable. It says which record is the last that it covers, and is used only if the journal has that very
record, or has lost it. It is never trusted over the journal: whatever is wrong with it, the records are read instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.checkpoint.manifest import has_valid_seal, sealed
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.core.json_floats import tag_floats, untag_floats
from holdfast.core.records import CheckpointCommitted, Record
from holdfast.core.summary import Summary
from holdfast.errors import NotFound, StorageError
from holdfast.journal.format import DIRECTORY, encode_line, fold_key
from holdfast.journal.reader import JournalReader, Mark
from holdfast.printable import printable
from holdfast.storage.store import Store
from holdfast.wire.messages import LogLine

__all__ = ["Fold", "FoldWriter", "decode_sealed", "encode_sealed", "newest_summaries", "read_fold"]

_FORMAT = "holdfast.fold/2.0"
_FLUSH_S = 1.0
_LEAST_BYTES = 64 * 1024
_MOST_BYTES = 4 * 1024 * 1024
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Fold(msgspec.Struct, frozen=True, kw_only=True):
    """What is written: the summary of all records up to and including the one that `mark` names."""

    format: str = _FORMAT
    run: str
    mark: Mark
    summary: Summary


def encode_sealed(value: Any) -> bytes:
    """One line of JSON that ends in the BLAKE3 of what comes before it, as manifests do."""
    return sealed(msgspec.json.encode(tag_floats(msgspec.to_builtins(value))))


def decode_sealed(data: bytes, kind: type[_T]) -> _T | None:
    """None if it is torn, altered, or something else."""
    if not has_valid_seal(data):
        return None
    try:
        return msgspec.convert(untag_floats(msgspec.json.decode(data)), kind)
    except DECODE_ERRORS:
        return None


def newest_summaries(store: Store, what: str) -> list[str]:
    """The keys of what leases left beside the journal, the newest lease's first."""
    keys = [entry.key for entry in store.list(DIRECTORY) if entry.key.endswith(f".{what}.json")]
    return sorted(keys, reverse=True)


def read_fold(store: Store, reader: JournalReader, run: str) -> Fold | None:
    """The newest fold that may be used; what may not is told of, and the next older one is looked at."""
    for key in newest_summaries(store, "fold"):
        try:
            data = store.get(key)
        except NotFound:
            continue
        fold = decode_sealed(data, Fold)
        if fold is None:
            why = "it is damaged"
        elif fold.format != _FORMAT:
            continue
        elif fold.run != run or fold_key(fold.mark.epoch, fold.mark.lease) != key:
            why = "it is of another run"
        elif reader.is_cut(fold.mark):
            continue  # a controller that was fenced had gone on: its successor has cut these records off
        elif (crc := reader.find(fold.mark)) is not None and crc != fold.mark.crc:
            why = f"record {fold.mark.n} of the journal is another one"
        else:
            if crc is None:
                _log.warning(
                    "%s: the journal has lost record %d, which %s covers; the fold is used.",
                    store.uri,
                    fold.mark.n,
                    key,
                )
            return fold
        _log.warning(
            "%s/%s is not used, and the journal is read instead: %s.", store.uri, printable(key), printable(why)
        )
    return None


class FoldWriter:
    """The observer that writes the fold: at a commit after which enough came, or when much came without one."""

    def __init__(self, store: Store, epoch: int, lease: str, run: str, prior: Summary) -> None:
        """`prior` is the summary up to this controller's first record; it is changed from here on."""
        self._store = store
        self._epoch, self._lease, self._run = epoch, lease, run
        self._summary = prior
        self._n = 0
        self._last: Record | None = None
        self._since_bytes = 0
        """About how much was recorded since the last fold."""
        self._size_bytes = 0
        self._commits = False
        self._asked = threading.Event()
        self._first = True
        self.least_bytes = _LEAST_BYTES
        """How much must be recorded, about, before a fold is written again."""

    def ask(self) -> None:
        """Have the fold written soon, whatever came since: the journal has lost records. From any thread."""
        self._asked.set()

    def record(self, record: Record) -> None:
        self._summary.apply(record)
        self._n += 1
        self._last = record
        # Encoding each record once more would double the cost of a report: a report is taken for 200 bytes.
        self._since_bytes += 200
        self._commits = self._commits or isinstance(record, CheckpointCommitted)

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        """Output is not in the journal."""

    @property
    def next_flush_s(self) -> float | None:
        return _FLUSH_S if self._is_due(final=False) else None

    def _is_due(self, *, final: bool) -> bool:
        enough = self._since_bytes >= max(self.least_bytes, self._size_bytes) and (self._commits or final)
        return self._last is not None and (enough or self._since_bytes >= _MOST_BYTES or self._asked.is_set())

    def flush(self, final: bool = False) -> None:
        if self._last is not None and self._is_due(final=final):
            is_asked = self._asked.is_set()
            self._asked.clear()
            try:
                self._write(self._last)
            except StorageError as error:
                if is_asked:
                    self._asked.set()  # what the journal has lost is nowhere else
                _log.info("The journal's fold could not be written this time: %s", error)

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, last: Record) -> None:
        line = encode_line(last, self._n, self._run)
        mark = Mark(self._epoch, self._lease, self._n, int(line[-11:-3], 16))
        data = encode_sealed(Fold(run=self._run, mark=mark, summary=self._summary))
        self._store.put(fold_key(self._epoch, self._lease), data)
        self._since_bytes, self._size_bytes, self._commits = 0, len(data), False
        if self._first:
            self._first = False
            older = [key for key in newest_summaries(self._store, "fold") if key < fold_key(self._epoch, self._lease)]
            self._store.delete(older[1:])  # the one before stays, in case that this one is damaged

"""`ResultFiles`: the observer that keeps result.json, progress.csv, the TensorBoard events, params.json and error.txt.

`record` only queues, so it costs next to nothing; `flush` does the work, in whatever thread it is called. The files
show the effective curve: what a rollback superseded is cut off again. A new controller goes on from what the one before
left (`journal/<epoch>-<lease>.views.json` says which records are in the files), reads the records since then from the
journal, and makes the files again from all records where they are not as they were left. A view that cannot be
written is warned of once and tried again; it never stops the run. A fenced controller writes nothing, nor does one that
cannot find out whether it is. Neighbours: `rows`, `tfevents`, `sinks`, `small_files`, and `core.curve`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.core import records as r
from holdfast.core.curve import Change, Curve, Row
from holdfast.core.metrics import flatten_metrics
from holdfast.errors import Fenced, NotFound, StorageError
from holdfast.journal.fold import decode_sealed, encode_sealed, newest_summaries
from holdfast.journal.format import fold_key
from holdfast.journal.reader import START, JournalReader, Mark
from holdfast.storage.durability import volatile
from holdfast.storage.retry import without_retries
from holdfast.storage.store import Store
from holdfast.views.files.rows import CsvTable, json_line
from holdfast.views.files.sinks import MirrorSink, SavedFile, Sink, can_append, open_sinks
from holdfast.views.files.small_files import error_text, params_text
from holdfast.views.files.tfevents import scalars_event, session_event, version_event
from holdfast.wire.messages import LogLine

__all__ = ["ResultFiles"]

_FLUSH_S = 1.0
"""Metrics are in the files so soon."""
_CHUNK_ROWS = 5_000
_HOLD_S = 2.0
"""How long a row waits for the name of its checkpoint before it is written without."""
_SAVE_ROWS = 1_000
"""After so many rows it is noted how far the files go: reading fewer again costs nothing."""
_PAUSE_S = 10.0
_BYTES_A_SECOND = 100_000
"""Whole objects are put so rarely that no more than this goes to the store in the long run, however large they grow."""
_log = logging.getLogger(__name__)


class _Sinks(NamedTuple):
    """The growing files. In this order they are written, so that what result.json has, TensorBoard has too."""

    events: Sink
    progress: Sink
    results: Sink


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """How far the files in storage go: all records up to `mark` are in them, but for the rows that wait."""

    mark: Mark
    curve: Curve
    columns: list[str]
    progress: SavedFile
    results: SavedFile
    waiting: list[Row] = []
    unsettled: list[int] = []


class ResultFiles:
    """Writes into the directory of the run, which is the root of `store`."""

    def __init__(
        self,
        store: Store,
        journal: JournalReader | None = None,
        *,
        epoch: int = 1,
        lease: str = "",
        params: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        fenced: Callable[[], bool] = lambda: False,
        appends: bool | None = None,
    ) -> None:
        """`journal` is read for what earlier epochs wrote. `fenced` says whether these files are another controller's
        by now, or might be. `appends` is what `can_append` says of the store, if that is known."""
        self._store = store
        self._journal = journal
        self._epoch, self._lease = epoch, lease
        self._fenced = fenced
        self._appends = appends
        self._clock = clock
        self._queue: deque[r.Record] = deque()
        self._lock = threading.Lock()
        self._started: r.ControllerStarted | None = None
        self._sinks: _Sinks | None = None
        self._applied = 0
        """How many of this controller's records are applied."""
        self._due_at = float("-inf")
        """When objects may be put again."""
        self._small: dict[str, bytes | None] = {"params.json": params_text(params or {})}
        """Small files still to be put, or (None) deleted."""
        self._failed = False
        self._failing = False
        self._reset(START, Curve(), CsvTable())

    def _reset(self, mark: Mark, curve: Curve, table: CsvTable) -> None:
        self._mark, self._curve, self._table = mark, curve, table
        self._waiting: deque[tuple[float, Row]] = deque()
        """Rows that are not written yet, with the time at which each came."""
        self._unsettled: dict[int, Row] = {}
        """By iteration: rows whose checkpoint is neither committed nor given up."""
        self._written = 0
        self._saved_rows = 0
        """How many rows the files had when that was last noted."""

    def record(self, record: r.Record) -> None:
        if self._started is None and isinstance(record, r.ControllerStarted):
            self._started = record
        self._queue.append(record)

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        """Worker output is kept by the agents; nothing of it is in these files."""

    @property
    def next_flush_s(self) -> float | None:
        """Soon while something is not in the files: a row that waits for the name of its checkpoint, what could not be
        written, what is not put into an object store again yet."""
        if self._started is None:
            return None
        sinks = self._sinks or ()
        waits = self._queue or self._waiting or self._small or self._failing or any(sink.pending for sink in sinks)
        return _FLUSH_S if waits or any(isinstance(sink, MirrorSink) and sink.dirty for sink in sinks) else None

    def flush(self, final: bool = False) -> bool:
        """False while what was recorded is not in the files: storage fails, or this controller is or may be fenced."""
        with self._lock:
            if self._started is None or self._fenced():
                return not self._queue
            failures: list[StorageError] = []
            try:
                if self._sinks is None:
                    self._sinks = self._open(self._started)
                self._apply_queued(self._sinks)
                self._emit(self._sinks, self._clock(), final)
                self._sync(self._sinks, final, failures)
                self._put_small(failures, final)
                if not failures:
                    self._save(self._sinks, final)
            except StorageError as error:
                failures.append(error)
            except Fenced as error:
                _log.info("The result files are left as they are: %s", error)
                return False
            if failures and not self._failing:
                _log.warning("The result files cannot be written now, and will be tried again: %s", failures[0])
            self._failing = bool(failures)
            return self._sinks is not None and not any(sink.pending for sink in self._sinks)

    def close(self) -> None:
        with self._lock:
            for sink in self._sinks or ():
                sink.close()

    # ------------------------------------------------------------ records in

    def _apply_queued(self, sinks: _Sinks) -> None:
        """Apply everything that was queued so far; more may be queued meanwhile."""
        now = self._clock()
        for _ in range(len(self._queue)):
            record = self._queue.popleft()
            self._apply(sinks, record, now)
            self._applied += 1
            self._mark = Mark(self._epoch, self._lease, self._applied)
            if isinstance(record, r.RunFailed):
                self._small["error.txt"] = error_text(record)
                self._failed = True

    def _apply(self, sinks: _Sinks, record: r.Record, now: float) -> None:
        change = self._curve.apply(record)
        row = change.row
        if row is None:
            self._settle_checkpoint(record)
        if change.kept_rows < self._written + len(self._waiting):
            self._roll_back(sinks, record.at, change)
        if row is not None:
            self._waiting.append((now, row))
            if isinstance(record, r.Reported) and record.checkpoint:
                self._unsettled[row.iteration] = row

    def _settle_checkpoint(self, record: r.Record) -> None:
        if isinstance(record, r.CheckpointCommitted):
            settled = self._unsettled.pop(record.iteration, None)
            if settled is not None:
                settled.checkpoint = record.name
        elif isinstance(record, r.CheckpointAbandoned):
            self._unsettled.pop(record.iteration, None)
        elif isinstance(record, r.GenerationStarted):
            self._unsettled.clear()

    def _roll_back(self, sinks: _Sinks, at: float, change: Change) -> None:
        """Only the rows that the change has kept count."""
        kept = change.kept_rows
        while self._waiting and self._written + len(self._waiting) > kept:
            self._waiting.pop()
        if kept < self._written:
            sinks.results.drop_lines(self._written - kept)
            sinks.progress.drop_lines(self._written - kept)
            sinks.events.append(session_event(at, change.kept_iteration + 1))
            self._written = kept
            self._saved_rows = min(self._saved_rows, kept - _SAVE_ROWS)  # what was noted is no longer true

    # ------------------------------------------------------------ where the files were left

    def _open(self, started: r.ControllerStarted) -> _Sinks:
        """Go on in the files that are there if they are as they were left; otherwise make them again."""
        events = f"events.out.tfevents.{int(started.at):010d}.{started.host}.{started.epoch:06d}"
        appends = can_append(self._store) if self._appends is None else self._appends
        keys = (events, "progress.csv", "result.json")
        sinks = _Sinks(*open_sinks(self._store, keys, self._fenced, appends=appends))
        try:
            sinks.events.start_over()
            sinks.events.append(version_event(started.at))
            if not self._resume(sinks, started):
                self._reset(START, Curve(), CsvTable())
                sinks.results.start_over()
                sinks.progress.start_over()
                sinks.progress.append(self._table.header())
                sinks.events.append(session_event(started.at, 0))
            self._replay(sinks)
        except BaseException:
            for sink in sinks:
                sink.close()
            raise
        if started.epoch > 1:
            self._small["error.txt"] = None  # it goes on after all
        return sinks

    def _resume(self, sinks: _Sinks, started: r.ControllerStarted) -> bool:
        for key in newest_summaries(self._store, "views") if self._journal is not None else []:
            try:
                saved = decode_sealed(self._store.get(key), _Saved)
            except NotFound:
                continue
            if saved is None or fold_key(saved.mark.epoch, saved.mark.lease, "views") != key:
                _log.warning("%s/%s is not what a controller left, and is not used.", self._store.uri, key)
                continue
            assert self._journal is not None
            if self._journal.is_cut(saved.mark) or saved.mark.epoch >= self._epoch:
                continue  # a controller that was fenced had gone on
            if sinks.results.resume(saved.results) and sinks.progress.resume(saved.progress):
                self._reset(saved.mark, saved.curve, CsvTable(saved.columns))
                unsettled = set(saved.unsettled)
                for row in saved.waiting:
                    self._waiting.append((row.at, row))
                    if row.iteration in unsettled:
                        self._unsettled[row.iteration] = row
                self._written = self._saved_rows = len(self._curve) - len(self._waiting)
                last_shown = saved.waiting[0].iteration - 1 if saved.waiting else saved.curve.last.iteration
                sinks.events.append(session_event(started.at, last_shown + 1))
                return True
            return False
        return False

    def _replay(self, sinks: _Sinks) -> None:
        """Apply what earlier epochs wrote to the journal and the files do not have."""
        if self._journal is None or self._epoch <= 1:
            return
        now = float("-inf")
        for count, (mark, line) in enumerate(self._journal.read(self._mark), start=1):
            if mark.epoch >= self._epoch:
                break
            now = max(now, line.record.at)
            self._apply(sinks, line.record, now)
            self._mark = mark
            if count % _CHUNK_ROWS == 0:
                self._emit(sinks, now, final=False)
                for sink in sinks:
                    sink.write()
        self._emit(sinks, now, final=False)
        clock = self._clock()
        self._waiting = deque((clock, row) for _, row in self._waiting)
        for sink in sinks:
            sink.write()

    def _save(self, sinks: _Sinks, final: bool) -> None:
        """Note how far the files in storage go, if that is worth it."""
        enough = self._written - self._saved_rows >= _SAVE_ROWS
        if not enough or not self._lease or len(self._waiting) > _SAVE_ROWS:
            return
        if any(isinstance(sink, MirrorSink) and sink.dirty for sink in sinks):
            return
        saved = _Saved(
            mark=self._mark,
            curve=self._curve,
            columns=self._table.columns,
            progress=sinks.progress.saved(),
            results=sinks.results.saved(),
            waiting=[row for _, row in self._waiting],
            unsettled=list(self._unsettled),
        )
        self._store.put(fold_key(self._epoch, self._lease, "views"), encode_sealed(saved))
        self._saved_rows = self._written

    # ------------------------------------------------------------ bytes out

    def _emit(self, sinks: _Sinks, now: float, final: bool) -> None:
        """Write the rows that are ready: those that wait for no checkpoint's name, or have waited long enough."""
        overdue = now - _HOLD_S
        rows: list[Row] = []
        while self._waiting and (
            final or self._waiting[0][1].iteration not in self._unsettled or self._waiting[0][0] <= overdue
        ):
            rows.append(self._waiting.popleft()[1])
        for start in range(0, len(rows), _CHUNK_ROWS):
            self._append(sinks, rows[start : start + _CHUNK_ROWS])
        self._written += len(rows)

    def _append(self, sinks: _Sinks, rows: list[Row]) -> None:
        flats = [flatten_metrics(row.metrics) for row in rows]
        new_columns = sum(self._table.widen(flat) for flat in flats)
        if new_columns:
            sinks.progress.rewrite(self._table.widened())
        sinks.events.append(b"".join(map(_event, rows, flats)))
        sinks.progress.append(b"".join(map(self._table.line, rows, flats)))
        sinks.results.append(b"".join(map(json_line, rows, flats)))

    def _sync(self, sinks: _Sinks, final: bool, failures: list[StorageError]) -> None:
        for sink in sinks:
            try:
                sink.sync()
            except StorageError as error:
                failures.append(error)
        mirrors = [sink for sink in sinks if isinstance(sink, MirrorSink)]
        if not mirrors or not (final or self._clock() >= self._due_at):
            return
        if final and self._epoch > 1:
            for mirror in mirrors:
                mirror.mend()
        size_bytes = sum(mirror.size_bytes for mirror in mirrors if mirror.dirty)
        if size_bytes:
            self._due_at = self._clock() + _PAUSE_S + size_bytes / _BYTES_A_SECOND
        for mirror in mirrors:
            try:
                if mirror.dirty:
                    mirror.upload()
            except StorageError as error:
                failures.append(error)

    def _put_small(self, failures: list[StorageError], final: bool) -> None:
        if final and self._epoch > 1 and not self._failed:
            self._small["error.txt"] = None  # a fenced controller's may have come late
        if not self._small:
            return
        once = volatile(without_retries(self._store))
        try:
            for key, data in list(self._small.items()):
                if self._fenced():
                    return
                if data is None:
                    once.delete([key])
                else:
                    once.put(key, data)
                del self._small[key]
        except StorageError as error:
            failures.append(error)


def _event(row: Row, flat: dict[str, Any]) -> bytes:
    return scalars_event(row.at, row.iteration, flat)

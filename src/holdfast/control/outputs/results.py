"""`ResultFiles`: the observer that keeps result.json, progress.csv, the TensorBoard events, params.json and error.txt.

`record` only queues, so it costs next to nothing; `flush` does the work, in whatever thread it is called. The files
show the effective curve: what a rollback superseded is cut off again. A new controller goes on in the files of the one
before where they agree with the journal, and makes them again where they do not. A view that cannot be written is
warned of once and tried again; it never stops the run. Neighbours: `curve`, `rows`, `tfevents`, `sinks`, `texts`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from holdfast.control.outputs.curve import Curve, Row
from holdfast.control.outputs.rows import CsvTable, flatten, json_line, parse_line
from holdfast.control.outputs.sinks import MirrorSink, Sink, Tail, open_sink
from holdfast.control.outputs.texts import error_text, params_text
from holdfast.control.outputs.tfevents import scalars_event, session_event, version_event
from holdfast.core import records as r
from holdfast.errors import StorageError
from holdfast.storage.store import Store
from holdfast.wire.messages import LogLine

__all__ = ["ResultFiles"]

_CHUNK_ROWS = 5_000
_HOLD_S = 2.0
"""How long a row waits for the name of its checkpoint before it is written without."""
_log = logging.getLogger(__name__)


class _Sinks(NamedTuple):
    """The growing files. In this order they are written, so that what result.json has, TensorBoard has too."""

    events: Sink
    progress: Sink
    results: Sink


class ResultFiles:
    """Writes into the directory of the run, which is the root of `store`. `prior` is the journal so far."""

    def __init__(
        self,
        store: Store,
        prior: Sequence[r.Record] = (),
        *,
        params: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        fenced: Callable[[], bool] = lambda: False,
    ) -> None:
        """`fenced` says whether these files are another controller's by now."""
        self._store = store
        self._fenced = fenced
        self._prior: Sequence[r.Record] = prior
        self._clock = clock
        self._queue: deque[r.Record] = deque()
        self._lock = threading.Lock()
        self._started: r.ControllerStarted | None = None
        self._curve = Curve()
        self._waiting: deque[tuple[float, Row]] = deque()
        """Rows that are not written yet, with the time at which each came."""
        self._unsettled: dict[int, Row] = {}
        """By iteration: rows whose checkpoint is neither committed nor given up."""
        self._written = 0
        self._table = CsvTable()
        self._sinks: _Sinks | None = None
        self._small: dict[str, bytes | None] = {"params.json": params_text(params or {})}
        """Small files still to be put, or (None) deleted."""
        self._failing = False

    def record(self, record: r.Record) -> None:
        if self._started is None and isinstance(record, r.ControllerStarted):
            self._started = record
        self._queue.append(record)

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        """Worker output is kept by the agents; nothing of it is in these files."""

    def flush(self, final: bool = False) -> None:
        with self._lock:
            if self._started is None or self._fenced():
                return  # nothing was decided yet, or nothing that counts
            failures: list[StorageError] = []
            try:
                if self._sinks is None:
                    self._sinks = self._open(self._started)
                self._take_in(self._sinks)
                self._emit(self._sinks, final)
            except StorageError as error:
                failures.append(error)
            failures += self._sync(final)
            if failures and not self._failing:
                _log.warning("The result files cannot be written now, and will be tried again: %s", failures[0])
            self._failing = bool(failures)

    def close(self) -> None:
        with self._lock:
            for sink in self._sinks or ():
                sink.close()

    # ------------------------------------------------------------ records in

    def _take_in(self, sinks: _Sinks) -> None:
        """Everything that was queued so far; more may be queued meanwhile."""
        now = self._clock()
        for _ in range(len(self._queue)):
            record = self._queue.popleft()
            self._take(record, now)
            if isinstance(record, r.GenerationStarted):
                self._roll_back(sinks, record)
            elif isinstance(record, r.RunFailed):
                self._small["error.txt"] = error_text(record)

    def _take(self, record: r.Record, now: float) -> None:
        row = self._curve.take(record)
        if row is not None:
            self._waiting.append((now, row))
            if isinstance(record, r.Reported) and record.checkpoint:
                self._unsettled[row.iteration] = row
        elif isinstance(record, r.CheckpointCommitted):
            settled = self._unsettled.pop(record.iteration, None)
            if settled is not None:
                settled.checkpoint = record.name
        elif isinstance(record, r.CheckpointAbandoned):
            self._unsettled.pop(record.iteration, None)
        elif isinstance(record, r.GenerationStarted):
            self._unsettled.clear()
            while self._waiting and self._waiting[-1][1].iteration > record.iteration:
                self._waiting.pop()

    def _roll_back(self, sinks: _Sinks, record: r.GenerationStarted) -> None:
        kept = len(self._curve)
        if kept < self._written:
            self._written = kept
            sinks.results.keep_lines(kept)
            sinks.progress.keep_lines(kept + 1)
            sinks.events.append(session_event(record.at, record.iteration + 1))

    # ------------------------------------------------------------ bytes out

    def _open(self, started: r.ControllerStarted) -> _Sinks:
        """Go on in the files that are there if they agree with the journal; otherwise make them again."""
        prior, self._prior = self._prior, ()
        for record in prior:
            self._take(record, 0.0)
            if isinstance(record, r.RunFailed):
                self._small["error.txt"] = None  # it goes on after all
        events = f"events.out.tfevents.{int(started.at):010d}.{started.host}.{started.epoch:06d}"
        sinks = _Sinks(*(open_sink(self._store, key, self._clock) for key in (events, "progress.csv", "result.json")))
        rows = [row for _, row in self._waiting]
        found = _agreeing(sinks.results.tail(), sinks.progress.tail(), rows)
        if found is not None:
            self._table, told = found
            done = told
        else:
            self._table = CsvTable()
            try:
                done, told = len(rows), self._make_again(sinks, rows)
            except StorageError:
                for sink in sinks:
                    sink.close()
                raise
        sinks.events.append(version_event(started.at))
        sinks.events.append(session_event(started.at, rows[told - 1].iteration + 1 if told else 0))
        sinks.events.append(b"".join(map(_event, rows[told:done], map(_flat, rows[told:done]))))
        for _ in range(done):
            self._waiting.popleft()
        self._written = done
        return sinks

    def _make_again(self, sinks: _Sinks, rows: list[Row]) -> int:
        """Write both tables anew; how many rows the event files of earlier controllers are known to hold."""
        for row in rows:
            self._table.widen(_flat(row))
        sinks.results.replace(_chunks(rows, json_line))
        sinks.progress.replace(chain([self._table.header()], _chunks(rows, self._table.line)))
        stored = [isinstance(sink, MirrorSink) and sink.same_as_stored() for sink in (sinks.results, sinks.progress)]
        return len(rows) if all(stored) else 0

    def _emit(self, sinks: _Sinks, final: bool) -> None:
        """Write the rows that are ready: those that wait for no checkpoint's name, or have waited long enough."""
        overdue = self._clock() - _HOLD_S
        rows: list[Row] = []
        while self._waiting and (
            final or self._waiting[0][1].iteration not in self._unsettled or self._waiting[0][0] <= overdue
        ):
            rows.append(self._waiting.popleft()[1])
        for start in range(0, len(rows), _CHUNK_ROWS):
            self._append(sinks, rows[start : start + _CHUNK_ROWS])
        self._written += len(rows)

    def _append(self, sinks: _Sinks, rows: list[Row]) -> None:
        flats = [flatten(row.metrics) for row in rows]
        new_columns = sum(self._table.widen(flat) for flat in flats)
        if new_columns:
            sinks.progress.rewrite(self._table.widened())
        sinks.events.append(b"".join(map(_event, rows, flats)))
        sinks.progress.append(b"".join(map(self._table.line, rows, flats)))
        sinks.results.append(b"".join(map(json_line, rows, flats)))

    def _sync(self, final: bool) -> list[StorageError]:
        failures: list[StorageError] = []
        for sink in self._sinks or ():
            try:
                sink.sync(final)
            except StorageError as error:
                failures.append(error)
        try:
            for key, data in list(self._small.items()):
                if data is None:
                    self._store.delete([key])
                else:
                    self._store.put(key, data)
                del self._small[key]
        except StorageError as error:
            failures.append(error)
        return failures


def _flat(row: Row) -> dict[str, Any]:
    return flatten(row.metrics)


def _event(row: Row, flat: dict[str, Any]) -> bytes:
    return scalars_event(row.at, row.iteration, flat)


def _chunks(rows: Sequence[Row], encode: Callable[[Row, dict[str, Any]], bytes]) -> Iterator[bytes]:
    for start in range(0, len(rows), _CHUNK_ROWS):
        yield b"".join(encode(row, flatten(row.metrics)) for row in rows[start : start + _CHUNK_ROWS])


def _agreeing(results: Tail | None, progress: Tail | None, rows: Sequence[Row]) -> tuple[CsvTable, int] | None:
    """The table and how many of the rows both files hold already, if they hold those and nothing else."""
    if results is None or progress is None or not 1 <= results.lines == progress.lines - 1 <= len(rows):
        return None
    row = rows[results.lines - 1]
    try:
        last = json.loads(results.last)
        table = CsvTable.parse_header(progress.first.decode())
        cells = parse_line(progress.last.decode())
    except ValueError:
        return None
    same = isinstance(last, dict) and last.get("training_iteration") == row.iteration
    if table is None or not same or last.get("time_total_s") != row.total_s:
        return None
    return (table, results.lines) if cells[0] == str(row.iteration) and len(cells) == table.width else None

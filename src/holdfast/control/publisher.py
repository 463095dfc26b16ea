"""Passing records and worker output to the observers: after they are durable, and off the controller's loop.

Each observer has a thread of its own: result files live in storage and may be slow, callbacks are the user's and may do
anything, and neither must delay a decision, the terminal, or each other. Reports may come faster than files can be
written: an observer that is far behind reads the records from the journal instead of a queue.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from holdfast.control.recent_logs import RecentLogs
from holdfast.core.records import Record
from holdfast.errors import StorageError
from holdfast.views.observer import Observer
from holdfast.wire.messages import LogLine

__all__ = ["Publisher", "ReadBack"]

_RETRY_S = 1.0
"""After so long the journal is read again, or an observer that could not write is asked to try again."""
_FLUSH_RECORDS = 500
"""After so many records an observer is flushed at once, or it would hold them all."""
_BACKLOG_RECORDS = 500
"""So many records may wait in memory for one observer."""
_TRIES = 5
"""When the run is over, the journal is read so often before a view is left as it is."""
_log = logging.getLogger(__name__)

ReadBack = Callable[[int], Iterable[tuple[int, Record]]]
"""The records of this controller after the n-th, each with its number, as the journal has them."""


class Publisher:
    """`hold` the records of a decision, `release` them once they are durable."""

    def __init__(self, observers: Sequence[Observer], read_back: ReadBack | None = None) -> None:
        self._threads = [_ObserverThread(observer, read_back) for observer in observers]
        self._held: list[Record] = []
        self.recent_logs = RecentLogs()

    @property
    def has_observers(self) -> bool:
        return bool(self._threads)

    def hold(self, records: Sequence[Record]) -> None:
        self._held.extend(records)

    def forget(self) -> None:
        """Drop what is held: this controller is fenced."""
        self._held.clear()

    def release(self) -> None:
        if self._held:
            for one in self._threads:
                one.put_records(self._held)
            self._held = []

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        self.recent_logs.add(generation, lines)
        for one in self._threads:
            one.put_logs(generation, lines)

    def wake(self, kind: type[Observer]) -> None:
        """Have observers of this class flush now: something has changed that no record tells of."""
        for one in self._threads:
            one.wake_if(kind)

    def wait_for(self, kind: type[Observer]) -> None:
        """Wait until observers of this class have got every record that was released."""
        for one in self._threads:
            one.wait_if(kind)

    def close(self) -> None:
        """Pass on what is left and wait until every observer has written it."""
        self.release()
        for one in self._threads:
            one.put_end()
        for one in self._threads:
            one.thread.join()


class _ObserverThread:
    """One observer and the thread that calls it."""

    def __init__(self, observer: Observer, read_back: ReadBack | None) -> None:
        self._observer = observer
        self._read_back = read_back
        self._changed = threading.Condition()
        self._queue: deque[list[Record] | tuple[int, Sequence[LogLine]]] = deque()
        self._waiting = 0
        """How many records are queued."""
        self._put = self._passed = 0
        """Numbers of the last record that was released, and of the last that the observer is given."""
        self._taken = 0
        """The number of the last record that the observer has dealt with."""
        self._over = False
        """The observer gets nothing any more."""
        self._behind = False
        """Records are not queued any more, but read back from the journal when the queue is empty."""
        self._ended = False
        self._failures = 0
        """How often in a row the journal could not be read."""
        self._flush_at = math.inf
        self._unflushed = 0
        self._blocked = False
        """The observer could not write what it got: nothing more is passed on, or it would hold all of it in memory."""
        name = f"holdfast-{type(observer).__name__.lower()}"
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def put_records(self, records: list[Record]) -> None:
        with self._changed:
            self._put += len(records)
            if self._read_back is not None and self._waiting > _BACKLOG_RECORDS:
                self._behind = True
            if not self._behind:
                self._queue.append(records)
                self._waiting += len(records)
            self._changed.notify()

    def put_logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        with self._changed:
            if not self._blocked:
                self._queue.append((generation, lines))
                self._changed.notify()

    def wake_if(self, kind: type[Observer]) -> None:
        if isinstance(self._observer, kind):
            with self._changed:
                self._flush_at = time.monotonic()
                self._changed.notify()

    def wait_if(self, kind: type[Observer]) -> None:
        """If the observer is of this class: wait until it has dealt with every record that was released so far."""
        if isinstance(self._observer, kind):
            with self._changed:
                end = self._put
                self._changed.wait_for(lambda: self._taken >= end or self._over)

    def put_end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._serve_next():
                pass
            self._observer.flush(True)
            self._observer.close()
        except BaseException:  # noqa: BLE001  the run outlives its views, whatever a user's callback raises
            _log.exception("%s failed and is switched off for the rest of this run.", type(self._observer).__name__)
            with self._changed:  # nothing is read from the queue any more
                self._queue.clear()
                self._behind, self._read_back, self._blocked, self._over = True, None, True, True
                self._changed.notify_all()

    def _serve_next(self) -> bool:
        """Pass the next item to the observer; False at the end."""
        with self._changed:
            is_idle = not self._queue and not self._behind
            if (is_idle or self._blocked) and not self._ended:
                self._changed.wait(self._until_flush_s())
            if self._blocked and not self._ended:
                item, behind, ended = None, False, False
            else:
                item, behind, ended = self._next_item()
        if isinstance(item, list):
            for record in item:
                self._pass_on(record)
        elif item is not None:
            self._observer.logs(*item)
        elif behind:
            self._catch_up()
        with self._changed:
            self._taken = self._passed
            self._changed.notify_all()
        self._flush_if_due()
        self._plan_flush()
        return not ended

    def _until_flush_s(self) -> float | None:
        return None if self._flush_at == math.inf else max(0.0, self._flush_at - time.monotonic())

    def _next_item(self) -> tuple[list[Record] | tuple[int, Sequence[LogLine]] | None, bool, bool]:
        """What is queued next, if anything; otherwise whether records must be read back, and whether that is all."""
        if not self._queue:
            return None, self._behind, self._ended and not self._behind
        item = self._queue.popleft()
        if isinstance(item, list):
            self._waiting -= len(item)
        return item, False, False

    def _catch_up(self) -> None:
        """Pass on what is in the journal; once nothing is missing, records are queued again."""
        assert self._read_back is not None
        with self._changed:
            end = self._put
        try:
            for n, record in self._read_back(self._passed):
                if n > end:
                    break
                self._passed = n - 1
                self._pass_on(record)
                self._flush_if_due()
                if self._blocked and not self._ended:
                    return
        except StorageError as error:
            _log.info("%s cannot read the journal now: %s", type(self._observer).__name__, error)
            with self._changed:
                self._failures += 1
                if not self._ended or self._failures < _TRIES:
                    self._changed.wait(_RETRY_S)
                    return
        self._failures = 0
        self._passed = end  # also where the journal has lost some
        with self._changed:
            self._behind = self._put > end

    def _pass_on(self, record: Record) -> None:
        self._passed += 1
        self._unflushed += 1
        self._observer.record(record)

    def _flush_if_due(self) -> None:
        if self._unflushed >= _FLUSH_RECORDS or time.monotonic() >= self._flush_at:
            with self._changed:  # whoever wakes the observer from here on has it flush once more
                self._flush_at = math.inf
            self._blocked = self._observer.flush() is False
            self._unflushed = 0

    def _plan_flush(self) -> None:
        pause_s = self._observer.next_flush_s
        if pause_s is None and self._blocked:
            pause_s = _RETRY_S
        if pause_s is not None:
            with self._changed:
                self._flush_at = min(self._flush_at, time.monotonic() + pause_s)

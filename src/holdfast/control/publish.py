"""Showing records and worker output to the observers: after they are durable, and off the controller's loop.

Each observer has a thread of its own: result files live in storage and may be slow, callbacks are the user's and may do
anything, and neither must delay a decision, the terminal, or each other.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

from holdfast.control.observer import Observer
from holdfast.core.records import Record
from holdfast.wire.messages import LogLine

__all__ = ["Publisher"]

_FLUSH_S = 1.0
_log = logging.getLogger(__name__)

_News = list[Record] | tuple[int, Sequence[LogLine]] | None
"""Records, a generation's output, or the end."""


class Publisher:
    """`hold` what was decided, `release` it once it is durable."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._desks = [_Desk(observer) for observer in observers]
        self._held: list[Record] = []

    def hold(self, records: Sequence[Record]) -> None:
        self._held.extend(records)

    def forget(self) -> None:
        """What was held is void."""
        self._held.clear()

    def release(self) -> None:
        if self._held:
            self._tell(self._held)
            self._held = []

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        self._tell((generation, lines))

    def close(self) -> None:
        """Show what is left and wait until it is written."""
        self.release()
        self._tell(None)
        for desk in self._desks:
            desk.thread.join()

    def _tell(self, news: _News) -> None:
        for desk in self._desks:
            desk.news.put(news)


class _Desk:
    """One observer and the thread that calls it."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        name = f"holdfast-{type(observer).__name__.lower()}"
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self._serve()
        except Exception:  # noqa: BLE001  the run outlives its views
            _log.exception("%s failed and is switched off for the rest of this run.", type(self._observer).__name__)

    def _serve(self) -> None:
        flush_at = time.monotonic() + _FLUSH_S
        while True:
            try:
                news = self.news.get(timeout=max(0.0, flush_at - time.monotonic()))
            except queue.Empty:
                news = []
            if news is None:
                break
            if isinstance(news, list):
                for record in news:
                    self._observer.record(record)
            else:
                self._observer.logs(*news)
            if time.monotonic() >= flush_at:
                self._observer.flush()
                flush_at = time.monotonic() + _FLUSH_S
        self._observer.flush(True)
        self._observer.close()

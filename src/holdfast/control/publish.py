"""Showing records and worker output to the observers: after they are durable, and off the controller's loop.

Result files live in storage and may be slow; the terminal is quick. Both are observers, and both are called from one
thread of the publisher's own, so a slow store never delays a decision.
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


class Publisher:
    """`hold` what was decided, `release` it once it is durable."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        self._held: list[Record] = []
        self._queue: queue.SimpleQueue[list[Record] | tuple[int, Sequence[LogLine]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="holdfast-publish", daemon=True)
        self._thread.start()

    def hold(self, records: Sequence[Record]) -> None:
        self._held.extend(records)

    def release(self) -> None:
        if self._held:
            self._queue.put(self._held)
            self._held = []

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        self._queue.put((generation, lines))

    def close(self) -> None:
        """Show what is left and wait until it is written."""
        self.release()
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        next_flush = time.monotonic() + _FLUSH_S
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, next_flush - time.monotonic()))
            except queue.Empty:
                item = []
            if item is None:
                break
            if isinstance(item, list):
                for record in item:
                    self._each("record", record)
            else:
                self._each("logs", *item)
            if time.monotonic() >= next_flush:
                self._each("flush")
                next_flush = time.monotonic() + _FLUSH_S
        self._each("flush", True)
        self._each("close")

    def _each(self, method: str, *arguments: object) -> None:
        """An observer that fails is dropped, loudly: a broken view must not break the run."""
        for observer in list(self._observers):
            try:
                getattr(observer, method)(*arguments)
            except Exception:  # noqa: BLE001  the run outlives its views
                _log.exception("%s failed and is switched off for the rest of this run.", type(observer).__name__)
                self._observers.remove(observer)

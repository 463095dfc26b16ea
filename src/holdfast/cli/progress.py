"""One line on a terminal for what takes longer than a second: bytes, rate, time left. Nothing anywhere else.

A `Meter` is handed to transfers as their callback (`OnBytes`), from any number of threads; it also is where Ctrl-C
stops them (see `interrupt`).
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from holdfast.cli import interrupt
from holdfast.views.formatting import rough_duration, size_text

__all__ = ["Meter"]

_QUIET_S = 1.0
_EVERY_S = 0.1
_BAR_WIDTH = 24
_LEAST_BAR_WIDTH = 5


class Meter:
    """Counts bytes and draws them. Used as a context manager, so that the line is gone when the work is."""

    def __init__(
        self,
        label: str,
        total_bytes: int | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.done_bytes = 0
        self._label = label
        self._total_bytes = total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s = clock()
        self._next_s = self._started_s + _QUIET_S
        self._visible = False
        self.shown = self._stream.isatty()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def expect(self, total_bytes: int) -> None:
        """Set the total, where it is known only after the meter was made."""
        self._total_bytes = total_bytes

    def __call__(self, count: int) -> None:
        interrupt.check()
        with self._lock:
            self.done_bytes += count
            now_s = self._clock()
            if self.shown and now_s >= self._next_s:
                self._next_s = now_s + _EVERY_S
                self._draw()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self.shown = False
            if self._visible:
                self._stream.write("\r\x1b[K")
                self._stream.flush()

    def line(self, columns: int = 80) -> str:
        """The line for a terminal of that width; the bar fills what the text leaves."""
        rate = self.done_bytes / max(self.elapsed_s, 1e-9)
        if not self._total_bytes:
            return f"{self._label}  {size_text(self.done_bytes)}  {size_text(rate)}/s"[:columns]
        share = min(1.0, self.done_bytes / self._total_bytes)
        left_s = max(0, self._total_bytes - self.done_bytes) / max(rate, 1e-9)
        amount = f"{size_text(self.done_bytes)} of {size_text(self._total_bytes)}"
        shown = f"{share:4.0%}  {amount}  {size_text(rate)}/s  {rough_duration(left_s)} left"
        width = min(_BAR_WIDTH, columns - len(self._label) - len(shown) - 3)
        bar = ("█" * round(share * width)).ljust(width, "░") + " " if width >= _LEAST_BAR_WIDTH else ""
        return f"{self._label}  {bar}{shown}"[:columns]

    def _draw(self) -> None:
        self._visible = True
        # The last column stays free: some terminals wrap as soon as it is filled.
        self._stream.write("\r\x1b[K" + self.line(shutil.get_terminal_size().columns - 1))
        self._stream.flush()

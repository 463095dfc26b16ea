"""Appends to log files in a thread of its own: a disk that stalls must not stall the agent's event loop.

`output` puts blocks of whole lines in, from the event loop; `worker` stops reading a worker's pipes while too much is
unwritten, so that the worker waits in `print` and nothing is lost or fills the memory. `run_storage` waits for what was
put before it takes the files to storage.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TextIO

from holdfast.storage.private_directory import make_private_directory

__all__ = ["LogFile", "LogWriter", "ThreadedHandler"]

_BACKLOG_MAX_BYTES = 8 * 1024 * 1024
_CLOSE_TIMEOUT_S = 1.0

_OnError = Callable[[OSError], None]


class LogFile:
    """One file. Made when the first line is written; every method is called from the event loop and returns at once."""

    def __init__(self, writer: LogWriter, path: Path, on_error: _OnError) -> None:
        self._writer = writer
        self._path = path
        self._on_error = on_error
        self._file: FileIO | None = None
        self._is_used = False

    def write(self, block: bytes) -> None:
        if not self._is_used:
            self._is_used = True
            self._writer._put(self._open, 0)
        self._writer._put(lambda: self._append(block), len(block))

    def close(self) -> None:
        if self._is_used:
            self._writer._put(self._close, 0)

    # The rest runs in the writer's thread.

    def _open(self) -> None:
        try:
            if not self._path.parent.exists():
                make_private_directory(self._path.parent)
            self._file = FileIO(str(self._path), "ab")
        except OSError as error:
            self._fail(error)

    def _append(self, block: bytes) -> None:
        left = memoryview(block)
        try:
            while left and self._file is not None:
                left = left[self._file.write(left) :]
        except OSError as error:  # a full disk must not take the workers along
            self._fail(error)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _fail(self, error: OSError) -> None:
        self._writer._call_soon(lambda: self._on_error(error))


class LogWriter:
    """One thread for all log files of an agent. Made on its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._backlog_bytes = 0
        self._waiting: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None

    @property
    def is_used(self) -> bool:
        """Whether there is any log file."""
        return self._thread is not None

    @property
    def is_behind(self) -> bool:
        """Whether so much is unwritten that nothing more should be read from workers."""
        return self._backlog_bytes > _BACKLOG_MAX_BYTES

    def when_caught_up(self, call: Callable[[], None]) -> None:
        """Call back on the event loop, once, when enough is written."""
        with self._lock:
            self._waiting.append(call)
        self._put(lambda: None, 0)  # the thread looks again, also if it caught up just now

    def wait_written(self, timeout_s: float) -> None:
        """Until everything that was put so far is in its file; from any other thread than the event loop's."""
        written = threading.Event()
        if self._thread is not None:
            self._work.put((written.set, 0))
            written.wait(timeout_s)

    def close(self) -> None:
        """Write what is left, and end the thread; a disk that stalls is not waited for."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _put(self, work: Callable[[], None], size_bytes: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-logs", daemon=True)
            self._thread.start()
        with self._lock:
            self._backlog_bytes += size_bytes
        self._work.put((work, size_bytes))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, size_bytes = item
            work()
            with self._lock:
                self._backlog_bytes -= size_bytes
                caught_up = self._backlog_bytes <= _BACKLOG_MAX_BYTES // 2
                waiting = self._waiting if caught_up else []
                if caught_up:
                    self._waiting = []
            for call in waiting:
                self._call_soon(call)

    def _call_soon(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return  # the agent's event loop is closed: nobody is left to be told


class ThreadedHandler(logging.Handler):
    """Writes log records to a stream in a thread, so that a stopped terminal (Ctrl+S) does not block whoever logs."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-stderr", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(self.format(record) + "\n")

    def close(self) -> None:
        """Write what is left, within a time limit."""
        self._lines.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError):
                continue  # nobody reads it any more

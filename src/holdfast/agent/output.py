"""What workers print: every byte into a file per rank, and line by line on to the controller.

The file comes first and is complete, and so are those that `joined_output` makes the user's files of
(`RunConfig(log_to_file)`). The way to the controller is bounded: when it lags, lines are left out there, and counted.
`log_writer` writes the files, `worker` reads the pipes of workers, `zygote_client` the zygote's; `artifact_sync` takes
the files to storage.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.agent.log_writer import LogFile, LogWriter
from holdfast.wire.messages import LogLine, Logs

__all__ = ["Forwarder", "Lines", "RankLog"]

_FLUSH_DELAY_S = 0.02
_BACKLOG_MAX_BYTES = 4 * 1024 * 1024
_LINES_MAX = 5_000
_LINE_MAX_BYTES = 16 * 1024
_TAIL_LINES = 20


class Lines:
    """Joins the pieces that a process wrote to whole lines; a `print` that is not buffered writes several."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Add what was read from a pipe; gives the lines that are complete now, and a part of one that is too long."""
        self._partial += data
        end = self._partial.rfind(b"\n") + 1
        if end == 0 and len(self._partial) >= _LINE_MAX_BYTES:
            end = len(self._partial)
        block = bytes(self._partial[:end])
        del self._partial[:end]
        return block

    def rest(self) -> bytes:
        """The last line, with a line feed if it has none; empty if there is nothing left."""
        block = bytes(self._partial) + b"\n" if self._partial else b""
        self._partial.clear()
        return block


class Forwarder:
    """Collects one generation's lines and sends them in batches."""

    def __init__(self, generation: int, send: Callable[[Logs], None], backlog_bytes: Callable[[], int]) -> None:
        self._generation = generation
        self._send = send
        self._backlog_bytes = backlog_bytes
        self._lines: list[LogLine] = []
        self._left_out: Counter[int] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: LogLine) -> None:
        if len(self._lines) >= _LINES_MAX:
            self._left_out[line.rank] += 1
            return
        self._lines.append(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_DELAY_S, self.flush)

    def flush(self) -> None:
        """Send what there is now, or count it where the controller lags."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._lines:
            return
        if self._backlog_bytes() > _BACKLOG_MAX_BYTES:
            self._left_out.update(line.rank for line in self._lines)
        else:
            notes = [
                LogLine(rank, "holdfast", f"{count} lines are left out here: they are in the log file.")
                for rank, count in self._left_out.items()
            ]
            self._left_out.clear()
            self._send(Logs(generation=self._generation, lines=[*self._lines, *notes]))
        self._lines = []


class RankLog:
    """One rank's log file, and the last lines that it wrote to stderr."""

    def __init__(
        self,
        path: Path,
        rank: int,
        forwarder: Forwarder,
        writer: LogWriter,
        copies: Mapping[str, Path] | None = None,
    ) -> None:
        """`copies` are the files that each stream goes to as well; both may have the same."""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.writer = writer
        self._file = LogFile(writer, path, self._cannot_write)
        copies = copies or {}
        files = {path: LogFile(writer, path, self._cannot_write) for path in copies.values()}
        self._copies = {stream: files[path] for stream, path in copies.items()}
        self._rank = rank
        self._forwarder = forwarder
        self._lines = {"stdout": Lines(), "stderr": Lines()}

    def feed(self, stream: str, data: bytes) -> None:
        """Add what was read from a pipe; only whole lines are passed on, so that two streams do not mix within one."""
        if block := self._lines[stream].feed(data):
            self._pass_on(stream, block)

    def note(self, text: str) -> None:
        """Write to the file only; the controller gets it in a message."""
        self._file.write(text.rstrip("\n").encode() + b"\n")

    def tell(self, text: str) -> None:
        """A line that is not the worker's own: to the file and to the controller, and not among its last lines."""
        self.note(text)
        self._forwarder.add(LogLine(self._rank, "holdfast", text))

    def close(self) -> None:
        """Write the last lines and close the file."""
        self.finish_lines()
        for file in {self._file, *self._copies.values()}:
            file.close()

    def finish_lines(self) -> None:
        """Pass on lines without a line feed: their process has ended."""
        for stream, lines in self._lines.items():
            if block := lines.rest():
                self._pass_on(stream, block)

    def _pass_on(self, stream: str, block: bytes) -> None:
        self._file.write(block)
        if stream in self._copies:
            self._copies[stream].write(block)
        for raw in block.splitlines() if b"\r" not in block else block.split(b"\n"):
            # What a progress bar wrote over is not worth showing again.
            text = raw.rstrip(b"\r").rpartition(b"\r")[2][:_LINE_MAX_BYTES].decode("utf-8", "replace")
            if raw:
                self._forwarder.add(LogLine(self._rank, stream, text))
                if stream == "stderr":
                    self.tail.append(text)

    def _cannot_write(self, error: OSError) -> None:
        self._forwarder.add(LogLine(self._rank, "holdfast", f"The log file cannot be written: {error.strerror}."))

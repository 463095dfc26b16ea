"""Writing to the terminal without ever waiting for it.

A terminal that was stopped (Ctrl+S), or a pager that nobody scrolls, blocks its writers; what watches a run must
not block. So text is written in small pieces, only while the stream is ready, and what piles up beyond a limit is left
out, and counted. A reader that goes away ends the writing, not the run. On a terminal status lines are drawn in place,
below the text: one for each run, for all runs of a process that print to the same stream share one writer
(`open_stream`). `terminal` and `worker_output` are the users.
"""

from __future__ import annotations

import os
import select
import shutil
import threading
import weakref
from collections import deque
from io import UnsupportedOperation
from typing import TextIO

from holdfast.printable import printable

__all__ = ["NonblockingStream", "is_notebook", "is_same_file", "open_stream"]

_PIECE_CHARS = 1_000
"""At most 4,000 bytes: so much goes into a pipe that is ready, without waiting."""
_BACKLOG_CHARS = 4_000_000
_ERASE_LINE = "\r\x1b[2K"
_ERASE_BELOW = "\r\x1b[J"


class NonblockingStream:
    """A stream, with what it can show. `interactive`: someone is looking at it. May be used from any thread."""

    def __init__(self, stream: TextIO, interactive: bool | None = None) -> None:
        self._stream = stream
        self._pieces: deque[str] = deque()
        self._backlog_chars = 0
        self._left_out = 0
        self._gone = False
        self.interactive = _is_terminal(stream) if interactive is None else interactive
        self.live = self.interactive and os.environ.get("TERM") != "dumb"
        """Whether a status line can be drawn."""
        self.colour = self.live and os.environ.get("NO_COLOR", "") == ""
        self._lock = threading.RLock()
        self._statuses: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        """What each run that prints here shows below everything else, "" if nothing now."""
        self._drawn: tuple[str, ...] = ()
        self._is_status_due = False
        """Whether the status lines may not be those that are drawn."""
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self.fine = _takes("╭─│", self._encoding)
        self._poll = _poll_of(stream)

    def style(self, text: str, code: str) -> str:
        """The text in that ANSI style, where colours are wanted."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def line(self, text: str, code: str = "", rest: str = "") -> None:
        """One or more lines, in the ANSI style `code` but for the `rest`; written when the stream is ready.

        Escape sequences in the text are shown, not obeyed: it may come from records that a stranger wrote.
        """
        text = printable(text, lines=True)
        self.raw((self.style(text, code) if code else text) + printable(rest, lines=True))

    def raw(self, text: str) -> None:
        """Like `line`, for text whose escape sequences are meant: a worker's output."""
        with self._lock:
            if self._gone:
                return
            if self._backlog_chars > _BACKLOG_CHARS:
                self._left_out += text.count("\n") + 1
                return
            self._put(f"{text}\n")

    @property
    def width(self) -> int:
        """Columns of the terminal; many where there is none."""
        if not self.interactive:
            return 160
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError, AttributeError):
            return shutil.get_terminal_size().columns

    @property
    def has_backlog(self) -> bool:
        """Whether there is text that the stream was not ready to take."""
        return bool(self._pieces)

    @property
    def is_shared(self) -> bool:
        """Whether several runs print here now."""
        return len(self._statuses) > 1

    def set_status(self, run: object, text: str) -> None:
        """The line, or lines, that `drain` shows for this run below everything else, where it can; "" for none. Each
        must fit on one."""
        with self._lock:
            self._statuses[run] = printable(text, lines=True) if self.live and not self._gone else ""
            self._is_status_due = self.live

    def leave(self, run: object) -> None:
        """The run prints nothing any more; it came with its first `set_status`."""
        with self._lock:
            self._statuses.pop(run, None)
            self._is_status_due = self.live

    def drain(self, *, wait: bool = False) -> None:
        """Write what the stream accepts now; with `wait`, all of it."""
        if not wait and not self._pieces and not self._is_status_due:
            return  # this is asked after every report
        with self._lock:
            self._drain(wait)

    def _drain(self, wait: bool) -> None:
        try:
            if self._pieces and self._drawn and (wait or self._ready()):
                self._draw(())
            while self._pieces and (wait or self._ready()):
                piece = self._pieces.popleft()
                self._backlog_chars -= len(piece)
                self._stream.write(piece)
                self._stream.flush()
                if not self._pieces and self._left_out:
                    self._put(f"[{self._left_out} lines are left out here: the terminal was too slow]\n")
                    self._left_out = 0
            if not self._pieces and (lines := self._status_lines()) != self._drawn and (wait or self._ready()):
                self._draw(lines)
            self._is_status_due = self._status_lines() != self._drawn
        except (OSError, ValueError):  # closed, by us or by the reader
            self._gone = True
            self._pieces.clear()

    def _status_lines(self) -> tuple[str, ...]:
        """What is to be drawn: no more than half of the terminal."""
        statuses = [text for text in self._statuses.values() if text]
        lines = [line for text in statuses for line in text.split("\n")]
        # The terminal is not asked for its size without need: this is done after every report.
        if len(lines) > 2 and len(lines) > (most := max(2, self.height // 2)):
            what = "runs" if len(lines) == len(statuses) else "lines"
            lines[most - 1 :] = [f"and {len(lines) - most + 1} more {what}"]
        return tuple(lines)

    def _draw(self, lines: tuple[str, ...]) -> None:
        """The cursor is left at the beginning of the first line, so that what others print does not begin behind it."""
        text = _ERASE_BELOW if max(len(lines), len(self._drawn)) > 1 else _ERASE_LINE
        if lines:
            text += "\n".join(map(self._encodable, lines)) + "\r"
        if len(lines) > 1:
            text += f"\x1b[{len(lines) - 1}A"
        self._stream.write(text)
        self._stream.flush()
        self._drawn = lines

    @property
    def height(self) -> int:
        """Lines of the terminal."""
        try:
            return os.get_terminal_size(self._stream.fileno()).lines or 24
        except (OSError, ValueError, AttributeError):
            return shutil.get_terminal_size().lines

    def _put(self, text: str) -> None:
        text = self._encodable(text)
        self._backlog_chars += len(text)
        for start in range(0, len(text), _PIECE_CHARS):
            self._pieces.append(text[start : start + _PIECE_CHARS])

    def _encodable(self, text: str) -> str:
        return text if text.isascii() else text.encode(self._encoding, "replace").decode(self._encoding)

    def _ready(self) -> bool:
        return self._poll is None or bool(self._poll.poll(0))


_lock = threading.Lock()
_open: weakref.WeakValueDictionary[int, NonblockingStream] = weakref.WeakValueDictionary()
"""By the identity of what they write to, which lives as long as they do."""


def open_stream(stream: TextIO, interactive: bool | None = None) -> NonblockingStream:
    """The one writer of this stream, for all runs of the process that print to it."""
    with _lock:
        found = _open.get(id(stream))
        if found is None:
            found = _open[id(stream)] = NonblockingStream(stream, interactive)
        return found


def is_notebook(stream: TextIO) -> bool:
    """Whether the stream writes to a cell's output. Its descriptor, if it has one, is the server's log."""
    return type(stream).__module__.startswith("ipykernel.")


def is_same_file(one: TextIO, other: TextIO) -> bool:
    """Whether what is written to both arrives in one place (a terminal, `2>&1`), where its order can be kept."""
    if one is other:
        return True
    fds = _fd_of(one), _fd_of(other)
    return None not in fds and os.path.sameopenfile(*fds)  # type: ignore[arg-type]


def _fd_of(stream: TextIO) -> int | None:
    if is_notebook(stream):
        return None
    try:
        return stream.fileno()
    except (UnsupportedOperation, AttributeError, ValueError, OSError):
        return None


def _poll_of(stream: TextIO) -> select.poll | None:
    """Polls whether the stream's descriptor accepts more; None where there is none (a notebook, a test)."""
    fd = _fd_of(stream)
    if fd is None:
        return None
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return poll


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def _takes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True

"""Writing to the terminal without ever waiting for it.

A terminal that was stopped (Ctrl+S), or a pager that nobody scrolls, blocks its writers; what watches a run must
not block. So text is written in small pieces, only while the stream is ready, and what piles up beyond a limit is left
out, and counted. A reader that goes away ends the writing, not the run. `terminal` is the only user.
"""

from __future__ import annotations

import os
import select
from collections import deque
from io import UnsupportedOperation
from typing import TextIO

from holdfast.printable import printable

__all__ = ["NonblockingStream"]

_PIECE_CHARS = 1_000
"""At most 4,000 bytes: so much goes into a pipe that is ready, without waiting."""
_BACKLOG_CHARS = 4_000_000


class NonblockingStream:
    """A stream, with what it can show. `interactive`: someone is looking at it."""

    def __init__(self, stream: TextIO, interactive: bool | None = None) -> None:
        self._stream = stream
        self._pieces: deque[str] = deque()
        self._backlog_chars = 0
        self._left_out = 0
        self._gone = False
        self.interactive = _is_terminal(stream) if interactive is None else interactive
        dumb = os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR", "") != ""
        self.colour = self.interactive and not dumb
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
        if self._gone:
            return
        if self._backlog_chars > _BACKLOG_CHARS:
            self._left_out += text.count("\n") + 1
            return
        self._put(f"{text}\n")

    def drain(self, *, wait: bool = False) -> None:
        """Write what the stream accepts now; with `wait`, all of it."""
        try:
            while self._pieces and (wait or self._ready()):
                piece = self._pieces.popleft()
                self._backlog_chars -= len(piece)
                self._stream.write(piece)
                self._stream.flush()
                if not self._pieces and self._left_out:
                    self._put(f"[{self._left_out} lines are left out here: the terminal was too slow]\n")
                    self._left_out = 0
        except (OSError, ValueError):  # closed, by us or by the reader
            self._gone = True
            self._pieces.clear()

    def _put(self, text: str) -> None:
        if not self.fine or not text.isascii():
            text = text.encode(self._encoding, "replace").decode(self._encoding)
        self._backlog_chars += len(text)
        for start in range(0, len(text), _PIECE_CHARS):
            self._pieces.append(text[start : start + _PIECE_CHARS])

    def _ready(self) -> bool:
        return self._poll is None or bool(self._poll.poll(0))


def _poll_of(stream: TextIO) -> select.poll | None:
    """Polls whether the stream's descriptor accepts more; None where there is none (a notebook, a test)."""
    try:
        fd = stream.fileno()
    except (UnsupportedOperation, AttributeError, ValueError, OSError):
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

"""What workers print, for one terminal: each line with its rank, equal lines of several ranks as one.

Lines are shown in the order in which they arrived, and each rank's lines in the order in which it printed them. A line
waits a moment for the other ranks to print the same; what came after it waits behind it. Standard output goes to the
driver's standard output, everything else to its standard error. Of a progress bar (carriage returns) only the last
state is shown. `terminal` feeds it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.views.formatting import ranks_brief
from holdfast.views.terminal.nonblocking_stream import NonblockingStream
from holdfast.wire.messages import LogLine

__all__ = ["WorkerOutput"]

_WAIT_S = 0.2
"""Ranks that train together print the same within milliseconds; a person does not notice so short a wait."""
_LINE_MAX_CHARS = 10_000
_WAITING_MAX = 2_000
_COLOURS = ("36", "33", "35", "32", "34", "31")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()*+#%][0-~]|[0-Z\\^-~])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;]*m)")
"""Also an escape character that begins anything but a style: what `_ESCAPE` does not know, or was cut off."""


@dataclass(slots=True)
class _Line:
    number: int
    stream: str
    text: str
    since: float
    ranks: list[int] = field(default_factory=list)


class WorkerOutput:
    """Prints to `stdout` and `stderr`; `hosts` maps ranks to hosts and is read for every line. `name` is the run's, and
    shown where other runs print to the same terminal."""

    def __init__(
        self,
        stdout: NonblockingStream,
        stderr: NonblockingStream,
        hosts: Mapping[int, str],
        clock: Callable[[], float],
        name: str = "",
    ) -> None:
        self._stdout, self._stderr = stdout, stderr
        self._hosts = hosts
        self._clock = clock
        self._name = name
        self.world_size = 0
        """With how many ranks a line is complete; 0 if that is not known."""
        self._waiting: deque[_Line] = deque()
        self._by_text: dict[tuple[str, str], list[_Line]] = {}
        self._last: dict[int, int] = {}
        """Number of the last line of each rank."""
        self._count = 0

    def lines(self, lines: Sequence[LogLine]) -> None:
        for one in lines:
            self._add(one.rank, one.stream, self._clean(one.text))
        self.flush(everything=len(self._waiting) > _WAITING_MAX)

    @property
    def is_waiting(self) -> bool:
        """Whether lines wait for other ranks to print the same."""
        return bool(self._waiting)

    def flush(self, everything: bool = False) -> None:
        """Print the lines that have waited long enough, or need not wait."""
        now = self._clock()
        while self._waiting:
            line = self._waiting[0]
            complete = line.ranks[0] < 0 or len(line.ranks) == self.world_size
            if not everything and not complete and now - line.since < _WAIT_S:
                return
            self._waiting.popleft()
            same = self._by_text[line.stream, line.text]
            same.remove(line)
            if not same:
                del self._by_text[line.stream, line.text]
            self._print(line)

    def _add(self, rank: int, stream: str, text: str) -> None:
        """Join a waiting line of the same text, unless it comes before something that this rank has printed since."""
        same = self._by_text.setdefault((stream, text), [])
        last = self._last.get(rank, 0)
        line = next((one for one in same if one.number > last), None)
        if line is None:
            self._count += 1
            line = _Line(self._count, stream, text, self._clock())
            same.append(line)
            self._waiting.append(line)
        line.ranks.append(rank)
        self._last[rank] = line.number

    def _print(self, line: _Line) -> None:
        stream = self._stdout if line.stream == "stdout" else self._stderr
        first = min(line.ranks)
        host = self._hosts.get(first) if len(line.ranks) == 1 and len(set(self._hosts.values())) > 1 else None
        who = "imports" if first < 0 else f"{ranks_brief(line.ranks)}{f', {host}' if host else ''}"
        if self._name and self._stderr.is_shared:
            who = f"{self._name}, {who}"
        styled = stream.style(f"({who})", f"2;{_COLOURS[first % len(_COLOURS)]}")
        stream.raw(f"{styled} {line.text}")

    def _clean(self, text: str) -> str:
        """One line without anything that moves the cursor; the worker's colours stay where colours are shown."""
        if "\r" in text:
            text = next((state for state in reversed(text.split("\r")) if state.strip()), "")
        left_out = len(text) - _LINE_MAX_CHARS
        if left_out > 0:
            text = f"{text[:_LINE_MAX_CHARS]}... [{left_out} more characters]"
        if "\x1b" in text:
            keep = self._stderr.colour
            text = _ESCAPE.sub(lambda found: found[0] if keep and _STYLE.fullmatch(found[0]) else "", text)
            if keep and "\x1b[" in text:
                text += "\x1b[0m"
            if not keep:
                text = text.replace("\x1b", "")
        return _CONTROL.sub("", text).rstrip("\n")

"""What the workers of a run printed lately, for control clients that ask for it.

The last lines are kept, up to a limit, and nothing else: a client that follows them has a position, and one that reads
too slowly is told how many lines it missed. So clients cost no memory, and none can delay the event loop. The whole
output is in the log files of the run's directory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.wire.messages import LogLine

__all__ = ["LogBatch", "RecentLogs"]

_LIMIT_CHARS = 256 * 1024
_LINE_CHARS = 64
"""What a line costs besides its text."""


class LogBatch(NamedTuple):
    """Lines that arrived together."""

    first: int
    """The number of the first of them, counted from the beginning of the run in this driver."""
    generation: int
    lines: Sequence[LogLine]


class RecentLogs:
    """The last lines of one run. Used from the hub's event loop only."""

    def __init__(self, limit_chars: int = _LIMIT_CHARS) -> None:
        self.is_closed = False
        """The run has ended: nothing is added any more."""
        self._limit_chars = limit_chars
        self._batches: deque[LogBatch] = deque()
        self._chars = 0
        self._count = 0
        """How many lines were ever added."""
        self._changed = asyncio.Event()

    def add(self, generation: int, lines: Sequence[LogLine]) -> None:
        if not lines:
            return
        self._batches.append(LogBatch(self._count, generation, lines))
        self._count += len(lines)
        self._chars += _chars(lines)
        while self._chars > self._limit_chars and len(self._batches) > 1:
            self._chars -= _chars(self._batches.popleft().lines)
        self._wake()

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def read(self, position: int) -> tuple[list[LogBatch], int, int]:
        """The lines from `position` on, how many before them are not kept any more, and the position after them."""
        batches = [batch for batch in self._batches if batch.first >= position]
        left_out = (batches[0].first if batches else self._count) - position
        return batches, left_out, self._count

    async def wait(self, position: int) -> None:
        """Until there are lines after `position`, or there will be none."""
        while self._count <= position and not self.is_closed:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _chars(lines: Sequence[LogLine]) -> int:
    return sum(len(line.text) + _LINE_CHARS for line in lines)

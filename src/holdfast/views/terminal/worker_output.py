"""What workers print, for one terminal: each line with its rank, equal lines of several ranks once.

A line that several ranks print is shown for the first of them at once, and for the others as one line with a count, a
second later. Of a progress bar (carriage returns) only the last state is shown. `terminal` feeds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.views.terminal.nonblocking_stream import NonblockingStream
from holdfast.wire.messages import LogLine

__all__ = ["WorkerOutput"]

_WINDOW_S = 1.0
_LINE_MAX_CHARS = 10_000
_OPEN_MAX = 2_000
_COLOURS = ("36", "33", "35", "32", "34", "31")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]")


@dataclass(slots=True)
class _Fold:
    """A line that one rank printed a moment ago, and how often others have printed it since."""

    rank: int
    since: float
    others: int = 0
    last_rank: int = 0


class WorkerOutput:
    """Prints to `stream`; `hosts` maps ranks to hosts and is read for every line."""

    def __init__(self, stream: NonblockingStream, hosts: Mapping[int, str], clock: Callable[[], float]) -> None:
        self._stream = stream
        self._hosts = hosts
        self._clock = clock
        self._folds: dict[str, _Fold] = {}

    def lines(self, lines: Sequence[LogLine]) -> None:
        now = self._clock()
        for line in lines:
            text = self._clean(line.text)
            fold = self._folds.get(text)
            if fold is None or fold.rank == line.rank:
                self._print(line.rank, text)
                if fold is None and text.strip():
                    self._folds[text] = _Fold(line.rank, now)
            else:
                fold.others += 1
                fold.last_rank = line.rank
        if len(self._folds) > _OPEN_MAX:
            self.flush(everything=True)

    def flush(self, everything: bool = False) -> None:
        """Print how often other ranks repeated a line, once the time for that is over."""
        now = self._clock()
        for text, fold in list(self._folds.items()):
            if everything or now - fold.since >= _WINDOW_S:
                del self._folds[text]
                if fold.others:
                    self._print(fold.last_rank, f"{text} [repeated {fold.others}x across ranks]")

    def _print(self, rank: int, text: str) -> None:
        host = self._hosts.get(rank)
        prefix = f"(rank {rank}, {host})" if host else f"(rank {rank})"
        styled = self._stream.style(prefix, f"2;{_COLOURS[rank % len(_COLOURS)]}")
        self._stream.raw(f"{styled} {text}")

    def _clean(self, text: str) -> str:
        """One line without anything that moves the cursor; the worker's colours stay where colours are shown."""
        if "\r" in text:
            text = next((state for state in reversed(text.split("\r")) if state.strip()), "")
        left_out = len(text) - _LINE_MAX_CHARS
        if left_out > 0:
            text = f"{text[:_LINE_MAX_CHARS]}... [{left_out} more characters]"
        if "\x1b" in text:
            keep = self._stream.colour
            text = _ESCAPE.sub(lambda found: found[0] if keep and _STYLE.fullmatch(found[0]) else "", text)
            if keep and "\x1b[" in text:
                text += "\x1b[0m"
            if not keep:
                text = text.replace("\x1b", "")
        return _CONTROL.sub("", text).rstrip("\n")

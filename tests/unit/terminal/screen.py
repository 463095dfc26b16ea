"""A terminal in memory with a clock that is moved by hand."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from holdfast.core import records as r
from holdfast.core.summary import summarize
from holdfast.views.terminal.terminal import Terminal
from holdfast.wire.messages import LogLine

__all__ = ["Screen"]


class Screen:
    """Feeds a `Terminal` and returns what it printed since the last call."""

    def __init__(self, **options: Any) -> None:
        self.stream = io.StringIO()
        self.now = 1000.0
        self._fed: list[r.Record] = []
        settings: dict[str, Any] = {"name": "finetune", "uri": "/store/finetune"}
        settings |= {"command": ["train.py", "--lr", "0.1"], "clock": lambda: self.now}
        stdout = options.pop("stdout", self.stream)
        self.terminal = Terminal(self.stream, stdout, **(settings | options))

    def feed(self, records: Iterable[r.Record], gap_s: float = 2.0) -> str:
        """One record every `gap_s`; what that printed."""
        for record in records:
            self._fed.append(record)
            self.now += gap_s
            self.terminal.record(record)
        return self.seen()

    def say(self, *lines: tuple[int, str]) -> str:
        self.terminal.logs(1, [LogLine(rank, "stdout", text) for rank, text in lines])
        return self.seen()

    def flush(self, after_s: float = 1.0, final: bool = False) -> str:
        self.now += after_s
        self.terminal.flush(final)
        return self.seen()

    def goodput(self) -> str:
        """As the accounts of what was fed have it."""
        goodput = summarize(self._fed).account.goodput
        assert goodput is not None
        return f"{100 * goodput:.1f} %"

    def seen(self) -> str:
        text = self.stream.getvalue()
        self.stream.seek(0)
        self.stream.truncate()
        return text

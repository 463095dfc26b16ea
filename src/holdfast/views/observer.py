"""The interface of what watches a run: result files, the terminal, callbacks.

`control.publisher` calls every observer from one thread, with records that are durable already; `views.files` and
`views.terminal` hold the observers that come with Holdfast. An observer decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.core.records import Record
from holdfast.wire.messages import LogLine

__all__ = ["Observer"]


class Observer(Protocol):
    """Gets every durable record and the output of workers, in order."""

    def record(self, record: Record) -> None:
        """One more record of the journal. Must be quick: thousands may come in a second."""
        ...

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        """What workers printed."""
        ...

    @property
    def next_flush_s(self) -> float | None:
        """In how long `flush` has something to do, should nothing more come; None: not before something does. Asked
        after whatever it is given: a run in which nothing happens wakes no thread."""
        ...

    def flush(self, final: bool = False) -> bool | None:
        """Called when it is due, and once at the end with `final`. May take as long as storage does. Returns False if
        what it got could not be written: until a flush succeeds it then gets no more records, and no output."""
        ...

    def close(self) -> None:
        """Release all resources; nothing is called after this."""
        ...

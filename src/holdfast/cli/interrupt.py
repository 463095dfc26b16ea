"""Ctrl-C: the main thread leaves at once, and transfers in other threads stop at their next block.

Without the second part, leaving a thread pool would wait for whole files. `main` installs it, `progress` asks it for
each block. A second Ctrl-C interrupts the tidying up as well; what is left then is invisible, and
`holdfast ckpt verify --repair` removes it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.errors import HoldfastError

__all__ = ["check", "watching"]

_asked = threading.Event()


@contextmanager
def watching() -> Iterator[None]:
    """Handle Ctrl-C while the block lasts; does nothing outside the main thread, where Python allows no handlers."""
    _asked.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def check() -> None:
    """Raise if Ctrl-C was pressed. Called for each block of a transfer."""
    if _asked.is_set():
        raise HoldfastError("The transfer was interrupted.")


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    _asked.set()
    raise KeyboardInterrupt

"""Starting an agent as a child process: what the engines that do so have in common."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["exit_phrase", "secret_pipe"]


@contextmanager
def secret_pipe(secret: str) -> Iterator[int]:
    """A pipe from which a child can read a secret, which neither its command line nor its environment shows."""
    reader, writer = os.pipe()
    try:
        os.write(writer, secret.encode())
        os.close(writer)
        yield reader
    finally:
        os.close(reader)


def exit_phrase(code: int) -> str:
    """How an agent ended, for people; `code` is that of `subprocess`."""
    if code < 0:
        try:
            return f"its agent was killed by {signal.Signals(-code).name}"
        except ValueError:  # a real-time signal, of which only the first and the last have names
            return f"its agent was killed by signal {-code}"
    return f"its agent exited with code {code}"

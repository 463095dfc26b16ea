"""A worker's file descriptors: its connection to the agent, its output, the pipe for stack dumps, and rank 0's
listening socket.

Output is caught at the level of descriptors, so that what C code and child processes print is caught too.
`faulthandler` writes to a pipe of its own: the stack of a crash goes into the report of it, and `DUMP_SIGNAL`
makes a worker that seems to hang say where, from C, whatever its interpreter is doing.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DUMP_SIGNAL",
    "WorkerFds",
    "buffer_lines",
    "detach_output",
    "fill_standard_descriptors",
    "open_streams",
    "redirect_output",
    "watch_for_crashes",
]

DUMP_SIGNAL = signal.SIGRTMIN + 8
"""A real-time signal: people and schedulers use SIGUSR1 and SIGUSR2 for themselves."""


@dataclass(frozen=True, slots=True)
class WorkerFds:
    """The descriptors as they were handed over."""

    connection: int
    stdout: int
    stderr: int
    dump: int
    listen: int | None = None

    @classmethod
    def from_fds(cls, fds: list[int]) -> WorkerFds:
        connection, stdout, stderr, dump, *listen = fds
        return cls(connection, stdout, stderr, dump, listen[0] if listen else None)

    @property
    def fds(self) -> list[int]:
        all_of_them = [self.connection, self.stdout, self.stderr, self.dump]
        return all_of_them if self.listen is None else [*all_of_them, self.listen]


def redirect_output(worker_fds: WorkerFds) -> None:
    """Make the two pipes this process's standard output and error."""
    os.dup2(worker_fds.stdout, 1)
    os.dup2(worker_fds.stderr, 2)
    os.close(worker_fds.stdout)
    os.close(worker_fds.stderr)
    buffer_lines()


def detach_output() -> None:
    """Point standard output and error to /dev/null, so that readers of the old ones do not wait for this process."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def fill_standard_descriptors() -> None:
    """Have /dev/null behind standard descriptors that the user's code, or a library, has closed: what is opened next
    would get the number of one, and whatever is printed would be written to it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(fd, True)
    os.close(fd)


def open_streams() -> None:
    """In a forked process: Python's streams anew, over the descriptors as they are now. A stream remembers whether it
    was opened on a file, and its parent may have put something else in its place."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _open_writer(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_writer(2, "backslashreplace")  # type: ignore[misc]


def _open_writer(fd: int, errors: str) -> io.TextIOWrapper:
    """As the interpreter opens them when it starts."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    encoding, _, given = os.environ.get("PYTHONIOENCODING", "").partition(":")
    stream: Any = open(fd, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        stream,
        encoding=encoding or None,
        errors=given or errors,
        line_buffering=fd == 2 or os.isatty(fd),
        write_through=unbuffered,
    )


def buffer_lines() -> None:
    """Let each line go out when it ends, and let nothing that is printed be an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def watch_for_crashes(dump_fd: int) -> None:
    faulthandler.enable(file=dump_fd, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, file=dump_fd, all_threads=True, chain=False)

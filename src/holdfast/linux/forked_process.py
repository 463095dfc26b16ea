"""What a forked child has from its parent and must not keep: descriptors, signal handlers, the command line.

A program that is started by execve gets rid of these by itself. `engines.driver_fork` forks agents from the driver,
and they must not hold the driver's files, pipes and sockets open, nor answer its signals.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["drop_descriptors", "rename_command", "reset_signal_handlers"]


def drop_descriptors(kept: Collection[int]) -> None:
    """Let go of every inherited descriptor but standard output and error, and those that are `kept`.

    /dev/null takes their places instead of nothing: objects of the parent that still live in this process may close
    their descriptor at any time, and must not find somebody else's under that number."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  Path is slow, and there may be many
        fd = int(name)
        if fd not in (1, 2, null) and fd not in kept:
            with suppress(OSError):  # the one that listed them
                os.fstat(fd)
                os.dup2(null, fd, inheritable=fd == 0)
    os.close(null)


def reset_signal_handlers() -> None:
    """As after execve: what was ignored stays so, all else is handled as by a fresh Python."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def rename_command(name: str) -> None:
    """Set the command line that `ps` shows and `pkill -f` looks for; cut to the length of the present one. Who kills
    the driver by its script's name must not kill the agent beside it."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
        if 0 < begin < end:
            size_bytes = end - begin
            ctypes.memmove(begin, name.encode()[: size_bytes - 1].ljust(size_bytes, b"\0"), size_bytes)

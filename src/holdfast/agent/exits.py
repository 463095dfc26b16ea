"""How a process ended, in a phrase for a person: exit codes, signals by name, and whether memory had run out.

The kernel does not tell who was killed for memory; it counts. A SIGKILL that nobody here sent, with a counter
that rose since the generation began, is taken for that.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ending", "ending_of", "oom_kills"]


@dataclass(frozen=True, slots=True)
class Ending:
    """A wait status in words."""

    cause: str
    code: int | None
    signal: int | None


def ending_of(status: int, *, out_of_memory: bool = False) -> Ending:
    """`status` as of wait(2); `out_of_memory` says whether the kernel has killed someone for memory meanwhile."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        why = " (out of memory)" if out_of_memory and number == signal.SIGKILL else ""
        return Ending(f"killed by {_signal_name(number)}{why}", None, number)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return Ending("exited with code 0 before its function returned", code, None)
    return Ending(f"exited with code {code}", code, None)


def oom_kills() -> int:
    """How many processes the kernel has killed for memory: on this machine, and in this control group."""
    total = _counter(Path("/proc/vmstat"))
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            relative = path.lstrip("/")
            if not controllers:
                total += _counter(Path("/sys/fs/cgroup", relative, "memory.events"))
            elif "memory" in controllers.split(","):
                total += _counter(Path("/sys/fs/cgroup/memory", relative, "memory.oom_control"))
    return total


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _counter(file: Path) -> int:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0

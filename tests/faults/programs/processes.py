"""Process trees in /proc: parents, children, and waiting for processes to end; and files that one process writes while
another waits for them."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

__all__ = [
    "children",
    "command_of",
    "describe",
    "descendants",
    "wait_gone",
    "with_environment",
    "name_of",
    "parent_of",
    "signal_all",
    "wait_until",
    "whole_lines",
    "write_whole",
]

_DEADLINE_S = 60.0
_LOOK_AGAIN_S = 0.005


def children(pid: int) -> list[int]:
    """The child processes, zombies included."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [one for child in below for one in descendants(child)]


def parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[1])


def command_of(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def name_of(pid: int) -> str:
    """What the process calls itself."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def describe(pid: int) -> str:
    """One line about a process: its name, whether it runs, waits or is dead, what it waits for, its cost so far."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" (")[2].rpartition(") ")
        waits_for = Path(f"/proc/{pid}/wchan").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return f"process {pid}: gone"
    fields = rest.split()
    ticks = int(fields[11]) + int(fields[12])
    return (
        f"process {pid} ({name}): state {fields[0]}, parent {fields[1]}, waits for {waits_for}, {ticks} ticks, "
        f"nice {fields[16]}, {fields[17]} threads: {command_of(pid)}"
    )


def with_environment(marker: str) -> list[int]:
    """All other processes that were started with `marker` ("NAME=value") in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if marker.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def wait_gone(*pids: int, within_s: float = _DEADLINE_S) -> None:
    """Wait until none of these processes runs any more; fails beyond the deadline."""
    end = monotonic() + within_s
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(max(0.0, end - monotonic()) * 1000), f"process {pid} still lives: {command_of(pid)}"
        finally:
            os.close(fd)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each of them that still runs: some end by themselves, and some when others get the signal."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until(condition: Callable[[], object], what: str, within_s: float = _DEADLINE_S) -> None:
    """Poll until the condition holds, for what no event announces, such as a file of another process."""
    end = monotonic() + within_s
    while not condition():
        assert monotonic() < end, f"waited in vain: {what}"
        sleep(_LOOK_AGAIN_S)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that another process may be writing, without a last one that has no end yet; none if there is
    no such file."""
    with suppress(FileNotFoundError):
        *whole, _ = path.read_bytes().split(b"\n")
        return [line.decode() for line in whole]
    return []


def write_whole(path: Path, text: str) -> None:
    """Write a file that another process waits for: it is there with all of its text, or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)

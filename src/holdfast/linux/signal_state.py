"""Whether a signal is still pending in a process, or its handler is still running.

A dump of Python stacks is written by a signal handler, line by line, and nothing marks its end; on a busy machine the
process may be descheduled before or within it. `/proc/<pid>/task/*/status` shows whether it has finished.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["blocking", "has_to_handle"]


def blocking(pid: int, number: int) -> set[int]:
    """The threads that block the signal: permanently, or while they handle it."""
    return {thread for thread, masks in _masks(pid).items() if _holds(masks["SigBlk"], number)}


def has_to_handle(pid: int, number: int, blocked_before: set[int]) -> bool:
    """Whether the signal is pending, or handled by a thread that did not block it before it was sent."""
    for thread, masks in _masks(pid).items():
        if _holds(masks["SigPnd"], number) or _holds(masks["ShdPnd"], number):
            return True
        if thread not in blocked_before and _holds(masks["SigBlk"], number):
            return True
    return False


def _masks(pid: int) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                lines = (line.partition(":") for line in (task / "status").read_text().splitlines())
                masks = {name: int(value, 16) for name, _, value in lines if name in ("SigPnd", "ShdPnd", "SigBlk")}
                found[int(task.name)] = masks
    return found


def _holds(mask: int, number: int) -> bool:
    return bool(mask >> (number - 1) & 1)

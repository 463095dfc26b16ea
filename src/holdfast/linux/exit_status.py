"""Describe a wait status for people: exit code, signal by name, and whether memory had run out.

The kernel only counts OOM kills; it does not say which process was killed. A SIGKILL that the agent did not send counts
as one if the counter rose since the generation began.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

__all__ = ["ExitStatus", "exit_status_of"]


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """A wait status in words."""

    cause: str
    """The rest of a sentence: "was killed by SIGKILL", "exited with code 3"."""
    signal: int | None


def exit_status_of(status: int, *, out_of_memory: bool = False) -> ExitStatus:
    """`status` as of wait(2); `out_of_memory` says whether the count of OOM kills rose meanwhile."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        why = " (out of memory)" if out_of_memory and number == signal.SIGKILL else ""
        return ExitStatus(f"was killed by {_signal_name(number)}{why}", number)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ExitStatus("exited with code 0 before its function returned", None)
    return ExitStatus(f"exited with code {code}", None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

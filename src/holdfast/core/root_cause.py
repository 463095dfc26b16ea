"""Which of several failures is the root cause.

When one rank dies, its peers fail moments later inside a collective, and their news may arrive first. Those errors say
only that somebody went away; the one that does not is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.failure_kind import FailureKind
from holdfast.core.records import WorkerFailure

__all__ = ["is_bug", "is_echo", "may_be_deterministic", "root_cause", "signature"]

_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "distbackenderror",
    "socket timeout",
    "timed out waiting",
    "remote process exited",
    "collective/result.cc",  # where XGBoost raises whatever goes wrong between its workers
)
_OF_THE_MACHINE = ("OSError", "IOError", "BlockingIOError", "ChildProcessError", "InterruptedError", "MemoryError")
_WORDS_OF_THE_MACHINE = (
    "timeout",
    "timed out",
    "connection",
    "brokenpipe",
    "outofmemory",
    "out of memory",
    "unavailable",
    "temporar",
    "cuda error",
    "nccl",
    "too many requests",
)
_KINDS_OF_BUGS = (FailureKind.OTHER, FailureKind.CONFIG, FailureKind.MISSING_EXTRA, FailureKind.INVALID_URI)


def root_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The first failure that is not the echo of another; failing that, the first."""
    return next((failure for failure in failures if not is_echo(failure)), failures[0])


def is_bug(failures: Sequence[WorkerFailure]) -> bool:
    """Whether the root cause is an exception of the user's code, which the same call would only raise again."""
    cause = root_cause(failures) if failures else None
    return cause is not None and cause.error_type is not None and cause.kind in _KINDS_OF_BUGS and not is_echo(cause)


def may_be_deterministic(failure: WorkerFailure) -> bool:
    """Whether the user's code raised it at a known line, and it does not tell of the machine, the network or a device:
    the same call may well raise it again."""
    if not is_bug([failure]) or not failure.traceback:
        return False
    text = f"{failure.error_type} {failure.error or ''}".lower()
    return failure.error_type not in _OF_THE_MACHINE and not any(word in text for word in _WORDS_OF_THE_MACHINE)


def signature(failure: WorkerFailure) -> str:
    """What makes two failures "the same": the kind of error and where it was raised, not its changing details."""
    if failure.error_type is None:
        return failure.cause
    frames = [line.strip() for line in (failure.traceback or "").splitlines() if line.startswith("  File ")]
    return f"{failure.error_type} at {frames[-1] if frames else 'unknown'}"


def is_echo(failure: WorkerFailure) -> bool:
    """Whether the error says only that another rank went away."""
    if failure.error_type is None:
        return False
    text = f"{failure.error_type} {failure.error or ''}".lower()
    return any(echo in text for echo in _ECHOES)

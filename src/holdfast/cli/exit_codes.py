"""What the command line's exit codes mean, and which error gets which.

They are documented in `holdfast ckpt --help` and in docs/checkpoints.md, and do not change meaning. `main` is the user.
"""

from __future__ import annotations

from holdfast import errors

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "NOT_FOUND",
    "OK",
    "REFUSED",
    "STORAGE",
    "USAGE",
    "Refused",
    "code_of",
    "sentence",
]

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
REFUSED = 4
STORAGE = 5
INTERRUPTED = 130


class Refused(errors.HoldfastError):
    """The command would destroy something that may be needed; the message names the option that forces it."""


# The first class that fits decides, so the narrow ones stand before the broad ones.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (Refused, REFUSED),
    (errors.NameTaken, REFUSED),
    (errors.Pinned, REFUSED),
    (errors.AlreadyExists, REFUSED),
    (errors.RunBusy, REFUSED),
    (errors.NotFound, NOT_FOUND),
    (errors.NotCommitted, NOT_FOUND),
    (errors.ConfigError, USAGE),
    (errors.StorageError, STORAGE),
)


def code_of(error: Exception) -> int:
    """The exit code for an error that ended a command."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def sentence(error: Exception) -> str:
    """The message to print: our own errors are sentences already."""
    if isinstance(error, errors.HoldfastError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}."
    return f"unexpected {type(error).__name__}: {error} (HOLDFAST_DEBUG=1 shows where it comes from)."

"""From an exception to a `WorkerFailure`: type, message, and the traceback without Holdfast's own frames.

Made in the worker (`bootstrap`) or while the job is unpickled (`job_loader`). It holds text: the exception itself may
not be picklable, or be of a type that nobody else has.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from pathlib import Path
from types import TracebackType

from holdfast import errors
from holdfast.core.failure_kind import FailureKind
from holdfast.core.records import WorkerFailure
from holdfast.errors import Damaged, HoldfastError

__all__ = ["damage_behind", "failure_of"]

_ERROR_CHARACTERS_MAX = 10_000
_TRACEBACK_CHARACTERS_MAX = 200_000
_NOT_THE_USERS = (f"{Path(errors.__file__).parent}{os.sep}", contextlib.__file__)


def failure_of(error: BaseException, rank: int, hidden_frames: int = 0, hint: str = "") -> WorkerFailure:
    """The failure that `error` is. The first `hidden_frames` of its traceback are ours and tell the user nothing."""
    trace: TracebackType | None = error.__traceback__
    for _ in range(hidden_frames):
        trace = trace.tb_next if trace is not None else None
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = _sound(_message(error) + hint)[:_ERROR_CHARACTERS_MAX]
    if isinstance(error, SystemExit):
        cause = f"called sys.exit({'' if error.code is None else repr(error.code)})"
    else:
        first = text.strip().split("\n", 1)[0]
        cause = f"raised {kind.__qualname__}: {first}" if first else f"raised {kind.__qualname__}"
    described = traceback.TracebackException(kind, error, trace, compact=True)
    if isinstance(error, HoldfastError):
        _keep_users_frames(described)
    lines = described.format()
    return WorkerFailure(
        rank=rank,
        cause=_sound(cause),
        error_type=name,
        error=text,
        traceback=_shorten(_sound("".join(lines) + hint)),
        kind=FailureKind.of(error),
    )


def _keep_users_frames(described: traceback.TracebackException) -> None:
    """Leave out what lies below the call that the user made: the sentence says what to do, our frames do not."""
    users = [n for n, frame in enumerate(described.stack) if not frame.filename.startswith(_NOT_THE_USERS)]
    del described.stack[users[-1] + 1 if users else 0 :]
    described.__cause__ = described.__context__ = None


def damage_behind(error: BaseException) -> Damaged | None:
    """The `Damaged` that `error` is, or was explicitly raised from: frameworks wrap what loading raises."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Damaged):
        seen = seen.__cause__
    return seen


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001  the user's own __str__ may do anything
        return f"(its __str__ raised {type(second).__qualname__})"


def _sound(text: str) -> str:
    """Without lone surrogates, which no message can carry."""
    return text.encode("utf-8", "replace").decode()


def _shorten(text: str) -> str:
    if len(text) <= _TRACEBACK_CHARACTERS_MAX:
        return text
    half = _TRACEBACK_CHARACTERS_MAX // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"

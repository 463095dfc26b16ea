"""From an exception to the words that travel: type, message, and the traceback without Holdfast's own frames.

Made in the worker (`bootstrap`) or while the job is opened (`job_loader`); shown by the controller.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from types import TracebackType

from holdfast.core.failure_kind import FailureKind
from holdfast.errors import Damaged
from holdfast.wire.messages import Exited

__all__ = ["Failure", "damage_behind", "describe"]

_ERROR_CHARACTERS_MAX = 10_000
_TRACEBACK_CHARACTERS_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as text; the exception itself may not be picklable, or be of a type that nobody else has."""

    cause: str
    error_type: str
    error: str
    traceback: str
    kind: FailureKind = FailureKind.OTHER
    damaged_checkpoint: str | None = None

    def as_exited(self, generation: int, rank: int) -> Exited:
        return Exited(
            generation=generation,
            rank=rank,
            cause=self.cause,
            kind=self.kind,
            damaged_checkpoint=self.damaged_checkpoint,
            error_type=self.error_type,
            error=self.error,
            traceback=self.traceback,
            code=1,
        )


def describe(error: BaseException, hidden_frames: int = 0, hint: str = "") -> Failure:
    """Say what `error` was. The first `hidden_frames` of its traceback are ours and tell the user nothing."""
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
    lines = traceback.TracebackException(kind, error, trace, compact=True).format()
    return Failure(
        cause=_sound(cause),
        error_type=name,
        error=text,
        traceback=_shorten(_sound("".join(lines) + hint)),
        kind=FailureKind.of(error),
    )


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

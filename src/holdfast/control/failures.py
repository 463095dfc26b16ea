"""A run's failure as the exceptions that users see: from `fit()`, in `Result.error`, and in callbacks.

All are made from records, so a failure read back from storage looks like one that just happened.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable
from typing import Any

from holdfast.core.failure_kind import FailureKind
from holdfast.core.preemption_info import preemption_info
from holdfast.core.records import RaisedError, RunFailed, WorkerFailure
from holdfast.core.root_cause import is_bug, root_cause
from holdfast.errors import ControllerError, PreemptionError, RunError, TrainingFailedError, WorkerGroupError

__all__ = ["rebuilt_error", "run_error", "worker_error"]


def run_error(ended: RunFailed, uri: str, continues: str = "the same call continues the run") -> TrainingFailedError:
    """What a failed run raises from `fit()`. `continues` says what makes it go on."""
    if ended.raised is not None:
        return ControllerError(_raised_error(ended.raised))
    if ended.error_type is not FailureKind.TRAINING_FAILED:
        return ControllerError(ended.error_type.as_error(ended.error, otherwise=RunError))
    if ended.preemption is not None:
        return PreemptionError(preemption_info(ended.preemption), ended.preemption.timed_out)
    way_out = f"Fix this, then {continues}" if is_bug(ended.failures) else continues[0].upper() + continues[1:]
    message = f"Training failed: {ended.error.rstrip('.')}. {way_out} in {uri}."
    if ended.failures and (trace := root_cause(ended.failures).traceback):
        message += f"\n\n{trace.rstrip()}"
    return WorkerGroupError(message, {failure.rank: worker_error(failure) for failure in ended.failures})


def worker_error(failure: WorkerFailure) -> Exception:
    """What a rank died of, as an exception of its own class where that can be had; the traceback is a note."""
    if failure.error_type is None:
        error: Exception = RuntimeError(f"rank {failure.rank} {failure.cause}")
    else:
        error = rebuilt_error(failure.error_type, failure.error or "")
    if failure.traceback:
        error.add_note(failure.traceback)
    elif failure.last_lines:
        error.add_note("The last lines that it printed:\n" + "\n".join(failure.last_lines))
    return error


def _raised_error(raised: RaisedError) -> Exception:
    """What a callback raised; the traceback is a note."""
    error = rebuilt_error(raised.error_type, raised.error)
    error.add_note(f"In the callback {raised.where}:\n{raised.traceback.rstrip()}")
    return error


def rebuilt_error(error_type: str, message: str) -> Exception:
    """An exception of the class of this name, where that can be had."""
    kind = _find_class(error_type)
    return _make(kind, message) if kind is not None else RuntimeError(f"{error_type}: {message}")


def _find_class(name: str) -> type[Exception] | None:
    """The exception class of this name, if this process has imported its module. Nothing is imported for it: the name
    may come from somebody else's storage."""
    if "." not in name:
        return _exception_class(getattr(builtins, name, None))
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:] if found is not None else ():
            found = getattr(found, part, None)
        if found is not None:
            return _exception_class(found)
    return None


def _exception_class(found: Any) -> type[Exception] | None:
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _make(kind: type[Exception], message: str) -> Exception:
    """An exception of this class that reads as the original did. Its constructor may want other arguments, or make
    another message of them: then it is made without it."""
    makers: tuple[Callable[[], Exception], ...] = (
        lambda: kind(message),
        lambda: kind.__new__(kind, message),
        lambda: kind(ast.literal_eval(message)),  # a `KeyError` reads as the repr of its key
    )
    for make in makers:
        try:
            error = make()
            if str(error) == message:
                return error
        except Exception:  # noqa: BLE001  whatever a constructor or a __str__ of the user's raises
            continue
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return RuntimeError(f"{name}: {message}")

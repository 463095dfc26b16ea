"""A run's failure as the exceptions that users see: from `fit()`, in `Result.error`, and in callbacks.

All are made from records, so a failure read back from storage looks like one that just happened.
"""

from __future__ import annotations

import builtins

from holdfast.core.failure_kind import FailureKind
from holdfast.core.records import RunFailed, WorkerFailure
from holdfast.errors import HoldfastError, RunError, TrainingFailedError

__all__ = ["run_error", "worker_error"]


def run_error(ended: RunFailed, uri: str) -> HoldfastError:
    """What a failed run raises from `fit()`."""
    if ended.error_type is not FailureKind.TRAINING_FAILED:
        return ended.error_type.as_error(ended.error, otherwise=RunError)
    return TrainingFailedError(
        f"Training failed: {ended.error}. The same call continues the run in {uri}.",
        {failure.rank: worker_error(failure) for failure in ended.failures},
    )


def worker_error(failure: WorkerFailure) -> Exception:
    """What a rank died of, as far as text can tell: its own class where that is Python's, the traceback as a note."""
    kind = getattr(builtins, failure.error_type or "", None)
    error: Exception
    if failure.error_type is None:
        error = RuntimeError(f"rank {failure.rank} {failure.cause}")
    elif isinstance(kind, type) and issubclass(kind, Exception):
        try:
            error = kind(failure.error)
        except TypeError:  # some, such as UnicodeDecodeError, take more than a message
            error = RuntimeError(f"{failure.error_type}: {failure.error}")
    else:
        error = RuntimeError(f"{failure.error_type}: {failure.error}")
    if failure.traceback:
        error.add_note(failure.traceback)
    elif failure.last_lines:
        error.add_note("The last lines that it printed:\n" + "\n".join(failure.last_lines))
    return error

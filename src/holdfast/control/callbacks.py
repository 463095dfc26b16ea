"""Users' callbacks as an observer: each hook is called once for what it names, in order; one that raises ends the run.

They run in a thread of their own, so that a slow one delays no decision; the run finishes when they have been called
for all of it (`core.commands.FinishCallbacks`).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.checkpoint.handle import Checkpoint
from holdfast.control.failures import worker_error
from holdfast.control.request import RunContext
from holdfast.core import records as r
from holdfast.storage.store import Store
from holdfast.wire.messages import LogLine

__all__ = ["CallbackObserver"]

_log = logging.getLogger(__name__)


class CallbackObserver:
    """`after_report` comes when every rank has made the report, and its checkpoint is committed or given up."""

    def __init__(self, callbacks: Sequence[Any], context: RunContext, store: Store) -> None:
        self._callbacks = callbacks
        self._context = context
        self._store = store
        self._world_size = 1
        self._waiting: dict[int, list[dict[str, Any]]] = {}
        """The metrics of iterations whose checkpoint is not committed yet, by rank."""
        self._failed = False
        self.on_error: Callable[[r.RaisedError], None] = lambda raised: None
        """Told, in the observer's thread, what a hook raised; the controller's."""
        self.on_exit: Callable[[BaseException], None] = lambda error: None
        """The same of what is no `Exception`: it is to come out of `fit()`, once the run has stopped."""

    def record(self, record: r.Record) -> None:
        match record:
            case r.ControllerStarted():
                self._call("after_run_start")
            case r.GenerationStarted():
                self._world_size = record.world_size
                self._call("_run_stands_at", record.iteration)
            case r.Reported() if self._world_size == 1:
                self._reported(record.iteration, [record.metrics], record.checkpoint)
            case r.RanksReported():
                self._reported(record.iteration, list(record.metrics), record.checkpoint)
            case r.CheckpointCommitted():
                self._settle(record.iteration, Checkpoint._from_store(self._store, record.name))
            case r.CheckpointAbandoned():
                self._settle(record.iteration, None)
            case r.GenerationEnded(failures=failures) if failures:
                self._call("after_exception", {failure.rank: worker_error(failure) for failure in failures})
            case r.RunFinished():
                self._call("after_run_end", "finished")
            case r.RunFailed():
                self._call("after_run_end", "failed")
            case r.RunInterrupted():
                self._call("after_run_end", "interrupted")
            case _:
                return

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        """No hook gets output."""

    next_flush_s = None

    def flush(self, final: bool = False) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is held."""

    def _reported(self, iteration: int, metrics: list[dict[str, Any]], checkpoint: bool) -> None:
        if checkpoint:
            self._waiting[iteration] = metrics
        else:
            self._call_report(iteration, metrics, None)

    def _settle(self, iteration: int, checkpoint: Checkpoint | None) -> None:
        metrics = self._waiting.pop(iteration, None)
        if metrics is not None:
            self._call_report(iteration, metrics, checkpoint)

    def _call_report(self, iteration: int, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        self._call("_before_report", iteration)
        self._call("after_report", metrics, checkpoint)

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback. After one has raised, nothing but the end of the run is told any more."""
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if method is None or (self._failed and hook != "after_run_end"):
                continue
            try:
                method(self._context, *arguments)
            except Exception as error:  # noqa: BLE001  whatever users write in a hook
                where = f"{type(callback).__name__}.{hook}"
                if hook == "after_run_end":
                    _log.exception("%s failed; the run has ended already.", where)
                else:
                    self._failed = True
                    self.on_error(_raised(where, error))
            except BaseException as error:  # noqa: BLE001  what would end the user's thread ends it where `fit()` is
                self._failed = True
                self.on_exit(error)


def _raised(where: str, error: Exception) -> r.RaisedError:
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the frame of `_call`
    kind = type(error)
    return r.RaisedError(
        where=where,
        error_type=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        error=str(error),
        traceback="".join(traceback.format_exception(kind, error, trace)),
    )

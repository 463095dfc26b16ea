"""Users' callbacks as an observer: each hook is called once for what it names, and none can harm the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
    """`after_report` comes at once for a report without a checkpoint, otherwise when that is committed or given up."""

    def __init__(self, callbacks: Sequence[Any], context: RunContext, store: Store) -> None:
        self._callbacks = callbacks
        self._context = context
        self._store = store
        self._waiting: dict[int, r.Reported] = {}

    def record(self, record: r.Record) -> None:
        match record:
            case r.ControllerStarted():
                self._call("after_run_start")
            case r.Reported(checkpoint=False):
                self._call("after_report", [record.metrics], None)
            case r.Reported():
                self._waiting[record.iteration] = record
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

    def flush(self, final: bool = False) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is held."""

    def _settle(self, iteration: int, checkpoint: Checkpoint | None) -> None:
        reported = self._waiting.pop(iteration, None)
        if reported is not None:
            self._call("after_report", [reported.metrics], checkpoint)

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if method is None:
                continue
            try:
                method(self._context, *arguments)
            except Exception:  # noqa: BLE001  whatever users write in a hook
                _log.exception("%s.%s failed; the run goes on.", type(callback).__name__, hook)

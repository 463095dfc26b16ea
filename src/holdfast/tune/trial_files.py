"""The result files of all trials, written in one thread: a trial's own files are copies of what the journal has.

A publisher of the experiment passes the lines on once they are durable, in a thread of its own; so no trial starts a
thread for its files, and none waits for them at its end. What cannot be written for a while is read back from the
journal.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.core import records as r
from holdfast.journal.format import Line
from holdfast.views.files.results import ResultFiles
from holdfast.wire.messages import LogLine

__all__ = ["TrialFiles"]

_log = logging.getLogger(__name__)


class TrialFiles:
    """Given to a `Publisher`, whose records are lines here: each names its run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[str, deque[ResultFiles]] = {}
        """By trial: files of runs whose first record has not come yet, in the order of their starts."""
        self._open: dict[str, ResultFiles] = {}

    def expect(self, trial_id: str, files: ResultFiles) -> None:
        """The trial is about to be started: these are its files until it ends. From any thread."""
        with self._lock:
            self._expected.setdefault(trial_id, deque()).append(files)

    def record(self, line: Line) -> None:
        trial_id, record = line.run, line.record
        if isinstance(record, r.ControllerStarted):
            with self._lock:
                waiting = self._expected[trial_id]
                self._open[trial_id] = waiting.popleft()
                if not waiting:
                    del self._expected[trial_id]
        if (files := self._open.get(trial_id)) is None:
            return
        files.record(record)
        if isinstance(record, r.RunFinished | r.RunFailed | r.RunInterrupted):
            self._end(trial_id, files)

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        """Trials' output is in their logs."""

    @property
    def next_flush_s(self) -> float | None:
        pauses_s = [pause_s for files in self._open.values() if (pause_s := files.next_flush_s) is not None]
        return min(pauses_s, default=None)

    def flush(self, final: bool = False) -> bool:
        """False while some trial's files lag behind."""
        behind = [one for one, files in list(self._open.items()) if self._try(one, files.flush) is False]
        return not behind

    def close(self) -> None:
        """What a trial that was not ended in order has reported is in its files, too."""
        for trial_id, files in list(self._open.items()):
            self._end(trial_id, files)

    def _end(self, trial_id: str, files: ResultFiles) -> None:
        self._try(trial_id, lambda: files.flush(final=True))
        self._open.pop(trial_id, None)
        files.close()

    def _try(self, trial_id: str, write: Callable[[], bool]) -> bool | None:
        """Whether all is written; None if that failed for good, which is no reason to give up others' files."""
        try:
            return write()
        except Exception:  # noqa: BLE001  the experiment outlives its views
            _log.exception("The result files of trial %s are not written any more.", trial_id)
            self._open.pop(trial_id).close()
            return None

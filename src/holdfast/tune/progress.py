"""An experiment in the terminal: a table of its trials that is drawn in place, or lines where nobody could see that.

Lines say that the experiment begins, how each trial ended, and what came of all. `verbose=0` and HOLDFAST_QUIET leave
the last one, HOLDFAST_JSON prints every record as a line of JSON instead. `trial_table` makes the table.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from holdfast.core import records as r
from holdfast.core.metrics import find_metric
from holdfast.journal.format import Line, encode_record
from holdfast.printable import printable
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.experiment_observer import ExperimentView
from holdfast.tune.machine import TrialState
from holdfast.tune.trial_table import TrialTable, estimate_left_s, status_counts, trial_score
from holdfast.views.formatting import count_text, metric_text, place, running_time
from holdfast.views.terminal.nonblocking_stream import is_notebook, open_stream
from holdfast.views.terminal.terminal import is_set

__all__ = ["JsonLines", "Progress"]

_DRAW_S = 0.5
_ROWS_MAX = 10
_LINES_AT_ONCE = 20
"""So many trials that ended since the last look get a line each, where there is no table."""
_RED, _GREEN = "31", "32"


class Progress(ExperimentView):
    """Shows to `stream` (standard error, or a notebook's output)."""

    def __init__(
        self,
        name: str,
        uri: str,
        table: TrialTable,
        *,
        quiet: bool,
        rows_max: int = _ROWS_MAX,
        total_trials: int | None = None,
        resources: Callable[[int], str] = lambda running: "",
        stream: TextIO | None = None,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resources` tells what so many trials take of what there is."""
        self._name, self._uri, self._table = name, uri, table
        self._quiet = quiet or is_set("HOLDFAST_QUIET")
        self._rows_max, self._total = rows_max, total_trials
        self._resources = resources
        if stream is None:
            stream = sys.stdout if is_notebook(sys.stdout) else sys.stderr
        self._stream = open_stream(stream, interactive)
        self._stream.set_status(self, "")
        self._clock = clock
        self._trials: list[TrialState] = []
        self._counts: Counter[str] = Counter()
        self._best: TrialState | None = None
        self._best_score = float("-inf")
        self._began_at, self._draw_at = clock(), float("-inf")
        self._finished_before = 0
        self._ended: list[TrialState] = []
        """Trials that ended since the last look."""

    # ------------------------------------------------------------ what happened

    def began(self, trials: Sequence[TrialState]) -> None:
        for trial in trials:
            self._add(trial)
            self._judge(trial)
        self._finished_before = self._finished
        if not self._quiet:
            before = f", {count_text(len(trials), 'trial', grouped=True)} so far" if trials else ""
            self._stream.line(f"Experiment {printable(self._name)} in {place(self._uri)}{before}")

    def trial_added(self, trial: TrialState) -> None:
        self._add(trial)

    def trial_changed(self, trial: TrialState, record: r.Record, before: str, result: dict[str, Any] | None) -> None:
        if result is not None:
            self._judge(trial)
        if before == trial.status:
            return
        self._counts[before] -= 1
        self._counts[trial.status] += 1
        if trial.is_finished():
            self._ended.append(trial)

    def ended(self, why: str) -> None:
        self._show_ended()
        self._stream.set_status(self, "")
        stopped = f" ({why})" if why else ""
        counts = status_counts(self._counts)
        best = f"; best: {printable(self._best.name)}{self._value(self._best)}" if self._best is not None else ""
        if not self._quiet and self._stream.live:
            for line in self._lines(_ROWS_MAX, self._stream.width)[-_ROWS_MAX - 2 :]:
                self._stream.line(line)
        took = running_time(self._clock() - self._began_at)
        self._stream.line(
            f"Experiment {printable(self._name)}: {counts}{stopped}{best}, {took}. Results: {place(self._uri)}",
            _RED if self._counts[Trial.ERROR] else _GREEN,
        )

    def flush(self, final: bool = False) -> None:
        self._show_ended()
        now = self._clock()
        if self._stream.live and not self._quiet and not final and now >= self._draw_at:
            self._draw_at = now + _DRAW_S
            # Half of the screen: two lines of summary, the heads, the rows, and how many are left out.
            rows = min(self._rows_max, max(1, self._stream.height // 2 - 4))
            self._stream.set_status(self, "\n".join(self._lines(rows, self._stream.width - 1)))
        self._stream.drain()

    def close(self) -> None:
        self._stream.leave(self)
        self._stream.drain(wait=True)

    # ------------------------------------------------------------ text

    def _show_ended(self) -> None:
        ended, self._ended = self._ended, []
        failed = [trial for trial in ended if trial.status == Trial.ERROR]
        if self._quiet:
            return
        # On a terminal the table has those that ended well.
        told = failed if self._stream.live else ended
        for trial in told[:_LINES_AT_ONCE]:
            how = "failed" if trial.status == Trial.ERROR else "ended"
            reports = count_text(trial.summary.iteration, "report")
            line = f"Trial {printable(trial.name)} {how} after {reports}{self._value(trial)}"
            self._stream.line(line, _RED if trial.status == Trial.ERROR else "")
        if len(told) > _LINES_AT_ONCE:
            self._stream.line(
                f"and {len(told) - _LINES_AT_ONCE} more trials: {status_counts(self._counts, self._total)}"
            )

    def _lines(self, rows: int, width: int) -> list[str]:
        elapsed_s = self._clock() - self._began_at
        here = self._finished - self._finished_before
        total = None if self._total is None else self._total - self._finished_before
        return self._table.lines(
            self._trials,
            elapsed_s=elapsed_s,
            rows_max=rows,
            width=width,
            resources=self._resources(self._counts[Trial.RUNNING]),
            best=self._best,
            left_s=estimate_left_s(here, total, elapsed_s),
            counts=self._counts,
        )

    def _value(self, trial: TrialState) -> str:
        if self._table.objective is None:
            return ""
        metric = self._table.objective.metric
        value = find_metric(trial.last_result, metric)
        return f", {metric} {metric_text(value)}" if value is not None else ""

    # ------------------------------------------------------------ counting

    @property
    def _finished(self) -> int:
        return self._counts[Trial.TERMINATED] + self._counts[Trial.ERROR]

    def _add(self, trial: TrialState) -> None:
        self._trials.append(trial)
        self._table.add(trial)
        self._counts[trial.status] += 1

    def _judge(self, trial: TrialState) -> None:
        """Keep the best up to date; a trial may also get worse."""
        objective = self._table.objective
        if objective is None:
            return
        score = trial_score(objective, trial)
        if trial is self._best and score < self._best_score:
            self._best = max(self._trials, key=lambda one: trial_score(objective, one))
            self._best_score = trial_score(objective, self._best)
        elif score > self._best_score:
            self._best, self._best_score = trial, score


class JsonLines(ExperimentView):
    """Prints every record as a line of JSON, with the run it is of."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = open_stream(stream or sys.stdout)

    def recorded(self, line: Line) -> None:
        self._stream.line(f'{{"run":"{line.run}",{encode_record(line.record).decode()[1:]}')

    def flush(self, final: bool = False) -> None:
        self._stream.drain()

    def close(self) -> None:
        self._stream.drain(wait=True)

"""`ProgressReporter` and its kin: how an experiment is shown, for `RunConfig(progress_reporter=...)`.

A `CLIReporter` chooses the columns of the table that is shown anyway. A class of the user's own, derived from
`ProgressReporter` or `CLIReporter`, is asked instead whenever something has happened (`progress`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import ConfigError
from holdfast.printable import printable
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.objective import check_metric, check_mode, find_objective
from holdfast.tune.trial_table import TrialTable

__all__ = ["CLIReporter", "JupyterNotebookReporter", "ProgressReporter", "is_users_own"]

Columns = Sequence[str] | Mapping[str, str] | None


class ProgressReporter:
    """Derive from it, and override `should_report` and `report`. Both are called in a thread of the driver, one at a
    time, with trials as they are in the journal."""

    def setup(
        self,
        start_time: float | None = None,
        total_samples: int | None = None,
        metric: str | None = None,
        mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Before the first trial."""

    def should_report(self, trials: list[Trial], done: bool = False) -> bool:
        """Whether `report` is to be called now; `done` at the end."""
        raise NotImplementedError(f"{type(self).__name__} has no should_report().")

    def report(self, trials: list[Trial], done: bool, *sys_info: str) -> None:
        """Show the trials."""
        raise NotImplementedError(f"{type(self).__name__} has no report().")


class CLIReporter(ProgressReporter):
    """The table of trials: which metrics and parameters it has as columns (names, or a dict from names to titles), how
    many rows, and by which metric the best is marked."""

    def __init__(
        self,
        *,
        metric_columns: Columns = None,
        parameter_columns: Columns = None,
        total_samples: int | None = None,
        max_progress_rows: int = 20,
        max_error_rows: int = 20,
        max_column_length: int = 20,
        max_report_frequency: int = 5,
        infer_limit: int = 3,
        print_intermediate_tables: bool | None = None,
        metric: str | None = None,
        mode: str | None = None,
        sort_by_metric: bool = False,
    ) -> None:
        kind = type(self).__name__
        check_metric(f"{kind}(metric)", metric, optional=True)
        check_mode(f"{kind}(mode)", mode, optional=True)
        self._metrics = _titles(f"{kind}(metric_columns)", metric_columns)
        self._parameters = _titles(f"{kind}(parameter_columns)", parameter_columns)
        self._rows_max = max_progress_rows
        self._column_length = max_column_length
        self._period_s = max_report_frequency
        self._infer_limit = infer_limit
        self._metric, self._mode = metric, mode
        self._sort_by_metric = sort_by_metric
        self._total_samples = total_samples
        self._start_time = time.time()
        self._reported_at = float("-inf")

    def setup(
        self,
        start_time: float | None = None,
        total_samples: int | None = None,
        metric: str | None = None,
        mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._start_time = start_time or time.time()
        self._total_samples = self._total_samples or total_samples
        self._metric, self._mode = self._metric or metric, self._mode or mode

    def add_metric_column(self, metric: str, representation: str | None = None) -> None:
        """One more metric, shown under another name if one is given."""
        self._metrics = (self._metrics or {}) | {metric: representation or metric}

    def add_parameter_column(self, parameter: str, representation: str | None = None) -> None:
        """One more parameter, shown under another name if one is given."""
        self._parameters = (self._parameters or {}) | {parameter: representation or parameter}

    def should_report(self, trials: list[Trial], done: bool = False) -> bool:
        """At the end, and otherwise every `max_report_frequency` seconds."""
        if done or time.monotonic() - self._reported_at >= self._period_s:
            self._reported_at = time.monotonic()
            return True
        return False

    def report(self, trials: list[Trial], done: bool, *sys_info: str) -> None:
        """Print the table."""
        table = self.make_table()
        for trial in trials:
            table.add(trial)
        lines = table.lines(trials, elapsed_s=time.time() - self._start_time, rows_max=self._rows_max)
        sys.stdout.write("\n".join([*lines, *sys_info, "", ""]))
        sys.stdout.flush()

    def make_table(self) -> TrialTable:
        """The table with these columns."""
        objective = find_objective(self._metric, self._mode)
        return TrialTable(
            objective,
            metrics=self._metrics,
            parameters=self._parameters,
            total_trials=self._total_samples,
            column_length=self._column_length,
            inferred_metrics=self._infer_limit,
            sort_by_metric=self._sort_by_metric,
        )

    @property
    def rows_max(self) -> int:
        """How many trials are shown at most."""
        return self._rows_max


class JupyterNotebookReporter(CLIReporter):
    """The same table, as text: notebooks show it below the cell. `overwrite` is accepted."""

    def __init__(self, *, overwrite: bool = True, **columns: Any) -> None:
        super().__init__(**columns)
        self.overwrite = overwrite


def is_users_own(reporter: ProgressReporter) -> bool:
    """Whether its methods are to be called; otherwise it only says which columns there are."""
    return type(reporter) not in (CLIReporter, JupyterNotebookReporter)


def _titles(what: str, columns: Columns) -> dict[str, str] | None:
    if columns is None:
        return None
    if isinstance(columns, Mapping):
        return {str(name): str(title) for name, title in columns.items()}
    if isinstance(columns, str) or not all(isinstance(one, str) for one in columns):
        raise ConfigError(f"{what} must be a list of names, or a dict from names to titles, not {columns!r}.")
    return {name: printable(name) for name in columns}

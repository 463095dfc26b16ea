"""An experiment in the terminal: a line when it begins, one for each trial that ends, and one at the end with the best.

Lines go to standard error, from the hub's thread, each in one write; `verbose=0` and HOLDFAST_QUIET leave the last.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TextIO

from holdfast.core.metrics import find_metric
from holdfast.printable import printable
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.machine import ExperimentMachine, TrialState
from holdfast.tune.objective import Objective

__all__ = ["ProgressLines"]


class ProgressLines:
    """Called by the experiment's controller."""

    def __init__(
        self, name: str, place: str, objective: Objective | None, *, quiet: bool, stream: TextIO | None = None
    ):
        self._name, self._place, self._objective = name, place, objective
        self._quiet = quiet or os.environ.get("HOLDFAST_QUIET", "") not in ("", "0")
        self._stream = stream or sys.stderr
        self._told: set[str] = set()

    def began(self, machine: ExperimentMachine) -> None:
        """Trials that had ended before are not told of again."""
        self._told = {trial.trial_id for trial in machine.trials.values() if trial.is_finished()}
        if not self._quiet:
            before = f", {len(machine.trials)} trials so far" if machine.trials else ""
            self._write(f"Experiment {self._name} in {self._place}{before}.")

    def trial_ended(self, trial: TrialState) -> None:
        if trial.trial_id in self._told or not trial.is_finished():
            return
        self._told.add(trial.trial_id)
        if self._quiet:
            return
        how = "failed" if trial.status == Trial.ERROR else "ended"
        count = trial.summary.iteration
        reports = "1 report" if count == 1 else f"{count} reports"
        self._write(f"Trial {trial.name} {how} after {reports}{self._score(trial)}.")

    def ended(self, machine: ExperimentMachine, why: str) -> None:
        counts = Counter(trial.status for trial in machine.trials.values())
        told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no trial"
        stopped = f" ({why})" if why else ""
        self._write(f"Experiment {self._name}: {told}{stopped}{self._best(machine)}. Results: {self._place}")

    def _best(self, machine: ExperimentMachine) -> str:
        if self._objective is None:
            return ""
        objective = self._objective
        scored = [
            (score, trial)
            for trial in machine.trials.values()
            if (score := objective.score(trial.last_result)) is not None
        ]
        if not scored:
            return ""
        _, best = max(scored, key=lambda one: one[0])
        return f"; best: {best.name}{self._score(best)}"

    def _score(self, trial: TrialState) -> str:
        if self._objective is None:
            return ""
        value = find_metric(trial.last_result, self._objective.metric)
        return f", {self._objective.metric} {value:.6g}" if isinstance(value, int | float) else ""

    def _write(self, line: str) -> None:
        try:
            self._stream.write(printable(line) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._quiet = True  # nobody reads it any more

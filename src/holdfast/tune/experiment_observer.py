"""Follows an experiment's journal, record by record once they are durable, and passes what happened to its views.

Views are the terminal, users' callbacks and progress reporters, and the mirror. The publisher calls the observer in a
thread of its own. Trials are folded anew here, by the same machine with policies that decide nothing: a view that is
behind sees each trial as it was when the record was made, and never waits for the controller, nor the controller for
it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.core import records as r
from holdfast.journal.format import Line
from holdfast.storage.uri import join
from holdfast.tune.config_codec import ConfigCodec
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.machine import ExperimentMachine, Policies, TrialState
from holdfast.tune.schedulers.trial_scheduler import FIFOScheduler, TuneController
from holdfast.tune.search.basic_variant import BasicVariantGenerator
from holdfast.wire.messages import LogLine

__all__ = ["ExperimentObserver", "ExperimentView", "replaying_machine"]


class ExperimentView:
    """Every method does nothing until it is overridden. They are called one at a time, in order."""

    def began(self, trials: Sequence[TrialState]) -> None:
        """Before anything else, with the trials that earlier drivers have left."""

    def trial_added(self, trial: TrialState) -> None:
        """There is a new trial."""

    def trial_changed(self, trial: TrialState, record: r.Record, before: str, result: dict[str, Any] | None) -> None:
        """A record of this trial was made: its own, or the experiment's decision on it. `before` was its status;
        `result` is what it reported with this record."""

    def ended(self, why: str) -> None:
        """No trial runs any more; `why` is what stopped the experiment before its time, if anything did."""

    def recorded(self, line: Line) -> None:
        """After all of that, for each record there is."""

    def flush(self, final: bool = False) -> None:
        """Several times a second, and once at the end."""

    def close(self) -> None:
        """Nothing is called after this."""


class _NoDecisions(FIFOScheduler):
    """Which paused trials went on when nothing else could is recorded of each."""

    def on_idle(self, tune_controller: TuneController) -> None:
        """Lets none go on."""


def replaying_machine(experiment_id: str, configs: ConfigCodec) -> ExperimentMachine:
    """A machine that is told what happened and decides nothing: decisions are recorded."""
    policies = Policies(BasicVariantGenerator(), _NoDecisions())
    return ExperimentMachine(experiment_id, policies, lambda trial: (trial.name, trial.directory), configs)


class ExperimentObserver:
    """Given to a `Publisher`, whose records are lines here: each names its run."""

    next_flush_s = 0.2
    """Tables show times, reporters and the mirror have pauses of their own."""

    def __init__(self, machine: ExperimentMachine, place: str, views: Iterable[ExperimentView]) -> None:
        """`machine` has all that earlier drivers recorded, and is not kept; `place` is the experiment's directory."""
        self._views = list(views)
        self._place = place
        self._machine = replaying_machine(machine.id, machine.configs)
        # Those that have come to an end change only if somebody wants them to run again.
        trials = machine.trials.values()
        self._machine.take_over(one if one.status == Trial.TERMINATED else _copied(one) for one in trials)
        for trial in self._machine.trials.values():
            trial.path = join(place, trial.directory)
        self._is_begun = False

    @property
    def trials(self) -> Sequence[TrialState]:
        return list(self._machine.trials.values())

    def record(self, line: Line) -> None:
        if not self._is_begun:
            self._begin()
        run, record = line.run, line.record
        trial = self._machine.trials.get(_trial_of(line, self._machine.id))
        before, last = (trial.status, trial.last_result) if trial is not None else ("", None)
        self._machine.apply(run, record)
        if isinstance(record, r.TrialCreated):
            made = self._machine.trials[record.trial]
            made.path = join(self._place, made.directory)
            self._tell(lambda view: view.trial_added(made))
        elif trial is not None:
            found = trial
            result = found.last_result if isinstance(record, r.Reported) and found.last_result is not last else None
            self._tell(lambda view: view.trial_changed(found, record, before, result))
        elif isinstance(record, r.ExperimentEnded):
            self._tell(lambda view: view.ended(record.why))
        self._tell(lambda view: view.recorded(line))

    def logs(self, generation: int, lines: Sequence[LogLine]) -> None:
        """Trials' output is in their logs."""

    def flush(self, final: bool = False) -> None:
        if not self._is_begun:
            self._begin()
        self._tell(lambda view: view.flush(final))

    def close(self) -> None:
        self._tell(lambda view: view.close())

    def _begin(self) -> None:
        self._is_begun = True
        trials = self.trials
        self._tell(lambda view: view.began(trials))

    def _tell(self, tell: Callable[[ExperimentView], None]) -> None:
        for view in self._views:
            tell(view)


def _trial_of(line: Line, experiment_id: str) -> str:
    return line.run if line.run != experiment_id else getattr(line.record, "trial", "")


def _copied(trial: TrialState) -> TrialState:
    made = copy.copy(trial)
    made.summary = copy.deepcopy(trial.summary)
    return made

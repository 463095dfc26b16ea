"""What control clients learn of an experiment, and what they may do with it (`control.api` serves them). Its trials are
runs of their own there.

`describe` is for those who find no driver as well: it needs the machine alone, which is made of the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.control.driver_thread import grace_s
from holdfast.control.run_control import STOPPED_BY_CLIENT, RunControl
from holdfast.core.events import StopRequested
from holdfast.core.masking import masked
from holdfast.train.request import plain_json
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.machine import ExperimentMachine, TrialState
from holdfast.tune.objective import Objective
from holdfast.tune.trial_table import best_trial
from holdfast.wire import control_messages as cm

__all__ = ["ExperimentControl", "ExperimentFacts", "describe", "describe_trial"]

_LIVE_MAX = 100
"""So many trials that have not ended are told of one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFacts:
    """What does not change while a driver has the experiment."""

    name: str
    uri: str
    objective: Objective | None
    host: str = ""
    pid: int = 0
    started_at: float = 0.0


def describe(machine: ExperimentMachine, facts: ExperimentFacts) -> cm.ExperimentStatusReply:
    """How the experiment stands, as far as the machine was told."""
    trials = machine.trials.values()
    best = None if facts.objective is None else best_trial(trials, facts.objective)
    live = [trial for trial in trials if not trial.is_finished()]
    running_first = sorted(live, key=lambda trial: trial.status != Trial.RUNNING)
    return cm.ExperimentStatusReply(
        name=facts.name,
        uri=facts.uri,
        host=facts.host,
        pid=facts.pid,
        started_at=facts.started_at,
        counts=dict(Counter(trial.status for trial in trials)),
        total_trials=machine.total_trials,
        best=None if best is None else describe_trial(best),
        live=tuple(describe_trial(trial) for trial in running_first[:_LIVE_MAX]),
        ended=machine.stop_why,
    )


def describe_trial(trial: Trial) -> cm.TrialStatus:
    assert isinstance(trial, TrialState)
    return cm.TrialStatus(
        trial=trial.trial_id,
        directory=trial.directory,
        status=trial.status,
        iteration=trial.summary.iteration,
        metrics=trial.summary.durable.metrics or {},
        config=masked("", plain_json(trial.config)),
    )


class ExperimentControl:
    """One experiment, for control clients. Used from the hub's event loop only."""

    logs = None
    """An experiment prints nothing; its trials do."""

    def __init__(
        self,
        facts: ExperimentFacts,
        machine: ExperimentMachine,
        trials: Callable[[], Mapping[str, RunControl]],
        stop: Callable[[StopRequested], None],
        join_string: str,
    ) -> None:
        """`trials` gives those that run."""
        self.stop = stop
        """Ends the experiment as a signal to its driver would."""
        self._facts = facts
        self._machine = machine
        self._trials = trials
        self._join_string = join_string

    def answer(self, request: cm.RunRequest) -> cm.ControlReply:
        match request:
            case cm.GetStatus():
                return describe(self._machine, self._facts)
            case cm.StopRun(force=force):
                self.stop(StopRequested(why=STOPPED_BY_CLIENT, force=force, grace_s=grace_s()))
                return cm.Done(text=f"Experiment {self._facts.name} is being stopped.")
            case cm.GetJoinString():
                return cm.Done(text=self._join_string)
            case cm.DrainNode():
                # A node is drained for all runs of the driver, whichever is asked.
                for trial in self._trials().values():
                    return trial.answer(request)
                return cm.Refused(reason="No trial runs now, so no node is used: try again when one does.")
            case cm.SetWorkers():
                return cm.Refused(reason=f"{self._facts.uri} is an experiment: name one of its trials.")
            case cm.ReadLogs():
                return cm.Refused(
                    reason=f"{self._facts.uri} is an experiment: name one of its trials, {self._example()}."
                )

    def _example(self) -> str:
        directories = [trial.directory for trial in self._machine.trials.values()]
        return f"such as {self._facts.uri}/{directories[-1]}" if directories else "when there is one"

"""The experiment's machine: which trial runs next, and which one stops. Pure: no clock, no I/O, no randomness.

An experiment's journal holds its own records and those of its trials, which are runs, in the order in which they were
made. `ExperimentMachine.apply` takes them in that order, whether they were recorded a moment ago or are read back by a
new driver: searcher, scheduler and stopper are told the same things in the same order, and so are what they were. A
decision and what it was based on cannot come apart, and nothing is ever written whole again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.core import records as r
from holdfast.core.curve import Row
from holdfast.core.metrics import find_metric
from holdfast.core.summary import Summary
from holdfast.errors import ConfigError
from holdfast.tune.config_codec import ConfigCodec
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.schedulers.trial_scheduler import TrialScheduler
from holdfast.tune.search.searcher import Searcher
from holdfast.tune.search.variant_generator import merge_configs
from holdfast.tune.serialization import to_json
from holdfast.tune.user_code import call_user_code

__all__ = ["AskSearcher", "CloneSource", "ExperimentMachine", "Policies", "StopRule", "TrialState", "make_result"]


class CloneSource(NamedTuple):
    """The checkpoint from which a clone starts."""

    donor: str
    directory: str
    """The donor's."""
    checkpoint: str
    decision: str
    """Tells this decision from every other of the experiment."""


class _Undecided(NamedTuple):
    """A result that is told once its checkpoint is committed, or given up."""

    iteration: int
    result: dict[str, Any]


@dataclass(eq=False, repr=False)
class TrialState(Trial):
    """A trial as the experiment keeps it."""

    number: int = 0
    """From 0, in the order of creation."""
    name: str = ""
    directory: str = ""
    """The name of its directory, below the experiment's."""
    summary: Summary = field(default_factory=Summary)
    """Of its run."""
    stopped: r.TrialStopped | None = None
    """The decision that it does not go on, until it runs again."""
    is_started: bool = False
    """Some controller has started its run."""
    restart: bool = False
    """It is to start from nothing, whatever checkpoints it has."""
    goes_on: bool = False
    """It pauses, and is to go on as soon as its workers have ended."""
    source: CloneSource | None = None
    """It is to start from this checkpoint of another trial."""
    pins: tuple[str, ...] = ()
    """Its checkpoints that stay, each as often as somebody wants it to."""
    undecided: _Undecided | None = None
    is_long_enough: bool = False
    """What the stopper says of its last result."""
    told_iteration: int = 0
    """How far searcher, scheduler and stopper know its results: what is done again after a rollback is not told
    again."""


class AskSearcher(NamedTuple):
    """The searcher is to be asked for a configuration, by `ExperimentMachine.ask`, which any thread may call;
    `ExperimentMachine.answer` takes what it gives."""

    trial_id: str


class StopRule(Protocol):
    """When a trial, or all of them, have gone on long enough: `tune.Stopper`."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool: ...

    def stop_all(self) -> bool: ...

    def resume_after(self, elapsed_s: float) -> None: ...


class Policies(NamedTuple):
    """What decides. All are told the same again after a restart, so none needs to be saved."""

    searcher: Searcher
    scheduler: TrialScheduler
    stopper: StopRule | None = None
    constants: Mapping[str, Any] = {}
    """The part of each configuration that the searcher leaves out."""
    total_trials: int | None = None
    """How many there will be at most."""
    max_concurrent: int = 1
    fail_fast: bool = False
    time_budget_s: float | None = None
    """How long the experiment may run, the time of earlier drivers included."""
    budget: str | None = None
    """The parameter that says how long a trial goes on. One that differs from another in that alone, and is longer,
    starts from the other's checkpoint."""
    space: Mapping[str, Any] = {}
    """What is searched: its keys are taken as they are, with slashes or without."""


_UNTOLD_MAX = 1_000
"""So much is kept for a searcher that is not asked any more."""
_STOPPED_ALL = "the stopper stops all trials"

NameTrial = Callable[[TrialState], tuple[str, str]]
"""From a new trial to its name, and the name of its directory."""


def make_result(trial: TrialState, row: Row) -> dict[str, Any]:
    """A report as searchers, schedulers and stoppers see it; a metric of the user's wins over what is added."""
    return {
        "timestamp": int(row.at),
        "time_this_iter_s": row.this_s,
        "time_total_s": row.total_s,
        "trial_id": trial.trial_id,
        "config": trial.config,
        **row.metrics,
        "training_iteration": row.iteration,
    }


class ExperimentMachine:
    """Every trial with its state. It is also what schedulers know as the experiment's controller."""

    def __init__(
        self,
        experiment_id: str,
        policies: Policies,
        name_trial: NameTrial,
        configs: ConfigCodec | None = None,
    ) -> None:
        self.id = experiment_id
        self.trials: dict[str, TrialState] = {}
        self._live: dict[str, TrialState] = {}
        """Those that have not ended."""
        self._interrupted: dict[str, TrialState] = {}
        """Those that ran when their driver ended: they go on before anybody is asked which trial does."""
        self.stop_why = ""
        """Why no trial is started any more; "" while some may be."""
        self.failed_fast: TrialState | None = None
        """The trial whose failure stopped all others."""
        self.elapsed_s = 0.0
        """How long drivers have run the experiment, as far as records tell."""
        self._last_at: float | None = None
        """When the last record of this driver, or of the one whose records are read back, was made."""
        self._policies = policies
        self._name_trial = name_trial
        self.configs = configs if configs is not None else ConfigCodec()
        self._suggested: TrialState | None = None
        """The trial whose record is about to be applied."""
        self._asking: AskSearcher | None = None
        """While the searcher is asked, in some thread, nobody else may call it, and no trial is started."""
        self._untold: deque[tuple[str, tuple[Any, ...]]] = deque()
        """What a searcher that is not quick is told before it is asked again: a method's name and arguments. It learns
        of the same things before each suggestion when records are read back."""
        self._alike: dict[bytes, list[TrialState]] = {}
        """With a budget: the trials of each configuration, whatever their budget."""
        self._told = 0
        """How many of those it was told."""
        self._is_exhausted = False
        self._is_waiting = False
        """The searcher has nothing to suggest before some trial has gone on."""
        self._stops: dict[str, r.TrialStopped] = {}
        """What was decided and is not recorded yet, by trial."""
        self._resets: dict[str, r.TrialReset] = {}
        """The same of trials that go on."""
        self._clones: dict[str, tuple[r.TrialCloned, dict[str, Any]]] = {}
        """The same of trials that become copies of others, each with its configuration."""
        self._now = 0.0
        self._by_directory: dict[str, str] = {}
        """The trials, by the names of their directories."""

    @property
    def total_trials(self) -> int | None:
        """How many trials there will be at most; None if there is no end."""
        return self._policies.total_trials

    # ------------------------------------------------------------ what schedulers ask

    def get_trials(self) -> Sequence[Trial]:
        return list(self.trials.values())

    def get_live_trials(self) -> Sequence[Trial]:
        return list(self._live.values())

    def stop_trial(self, trial: Trial) -> None:
        self._decide(self.trials[trial.trial_id], "stop_trial")

    def unpause_trial(self, trial: Trial) -> None:
        known = self.trials[trial.trial_id]
        if known.status == Trial.PAUSED:
            known.status = Trial.PENDING
            self._resets[trial.trial_id] = r.TrialReset(at=self._now, trial=trial.trial_id)
            return
        stopped = known.stopped or self._stops.get(trial.trial_id)
        if stopped is not None and stopped.paused:
            known.goes_on = True

    def pin_checkpoint(self, trial: Trial, checkpoint: str) -> None:
        self.trials[trial.trial_id].pins += (checkpoint,)

    def unpin_checkpoint(self, trial: Trial, checkpoint: str) -> None:
        known = self.trials[trial.trial_id]
        names = list(known.pins)
        if checkpoint in names:
            names.remove(checkpoint)
            known.pins = tuple(names)

    def exploit_trial(self, trial: Trial, donor: Trial, checkpoint: str, config: dict[str, Any]) -> None:
        known = self.trials[trial.trial_id]
        if known.is_finished():
            return
        cloned = r.TrialCloned(
            at=self._now,
            trial=trial.trial_id,
            iteration=known.summary.iteration,
            donor=donor.trial_id,
            checkpoint=checkpoint,
            config=self.configs.encode(config),
        )
        self._clones[trial.trial_id] = (cloned, config)

    # ------------------------------------------------------------ what happened

    def apply(self, run: str, record: r.Record) -> None:
        """Take one record in, of the experiment or of a trial. What is decided because of it is to be recorded and
        applied next (`decided`)."""
        self._now = record.at
        if self._last_at is not None and not isinstance(record, r.ExperimentStarted):
            self.elapsed_s += max(0.0, record.at - self._last_at)
        self._last_at = record.at
        if run == self.id:
            self._apply_own(record)
        elif (trial := self.trials.get(run)) is not None:
            self._apply_to_trial(trial, record)
            self._note_end(trial)

    def _note_end(self, trial: TrialState) -> None:
        if trial.is_finished():
            self._live.pop(trial.trial_id, None)
        elif trial.trial_id not in self._live:
            self._live[trial.trial_id] = trial

    @property
    def decided(self) -> list[r.TrialStopped | r.TrialReset | r.TrialCloned]:
        """What was decided and is not recorded yet."""
        clones = [cloned for cloned, _ in self._clones.values()]
        return [*self._stops.values(), *self._resets.values(), *clones]

    def _apply_own(self, record: r.Record) -> None:
        match record:
            case r.ExperimentStarted():
                self.stop_why, self.failed_fast = "", None
                # That all were to stop, and the driver died before it was recorded: it is decided anew whether they do.
                self._stops = {trial: stop for trial, stop in self._stops.items() if stop.by != "experiment"}
            case r.TrialCreated():
                self._add(record)
            case r.TrialStopped():
                self._stop(self.trials[record.trial], record)
            case r.TrialReset():
                self._reset(self.trials[record.trial], record)
            case r.TrialCloned():
                self._clone(self.trials[record.trial], record)
            case _:
                pass

    def _add(self, record: r.TrialCreated) -> None:
        trial, self._suggested = self._suggested, None
        if trial is None:
            trial = TrialState(record.trial, self.configs.decode(record.config), number=len(self.trials))
            self.tell_searcher(record.told)
            self._policies.searcher.replay_suggestion(record.trial, trial.config)
            self._call_scheduler("on_trial_add", trial)
        trial.name, trial.directory = record.name, record.directory
        self.trials[record.trial] = self._live[record.trial] = trial
        self._by_directory.setdefault(record.directory, record.trial)
        if self._policies.budget is not None:
            self._alike.setdefault(_split_budget(trial.config, self._policies.budget)[0], []).append(trial)
        if record.donor is not None and record.checkpoint is not None:
            self._start_from(trial, record.donor, record.checkpoint, record.at)

    def _apply_to_trial(self, trial: TrialState, record: r.Record) -> None:
        change = trial.summary.apply(record)
        match record:
            case r.ControllerStarted():
                trial.is_started, trial.restart, trial.stopped, trial.goes_on = True, False, None, False
                trial.status = Trial.RUNNING
                self._interrupted.pop(trial.trial_id, None)
                self._set_source(trial, None)  # it has the checkpoint
            case r.RunRestarted():
                trial.told_iteration = 0
            case r.GenerationStarted():
                if trial.undecided is not None and trial.undecided.iteration > record.iteration:
                    trial.undecided = None  # that report does not count any more
            case r.Reported() if change.row is not None and trial.stopped is None:
                self._take_undecided(trial)
                result = make_result(trial, change.row)
                if record.checkpoint and self._policies.scheduler.waits_for_checkpoints:
                    trial.undecided = _Undecided(record.iteration, result)
                else:
                    self._take_result(trial, result)
            case r.CheckpointCommitted():
                trial.checkpoint = trial.summary.newest_checkpoint
                self._take_undecided(trial, record.iteration)
            case r.CheckpointAbandoned():
                self._take_undecided(trial, record.iteration)
            case r.CheckpointDeleted() | r.CheckpointDamaged():
                trial.checkpoint = trial.summary.newest_checkpoint
            case r.RunFinished():
                self._take_undecided(trial)
                self._end(trial)
            case r.RunFailed():
                self._take_undecided(trial)
                self._fail(trial)
            case r.RunInterrupted() if trial.stopped is not None:
                self._end(trial)
            case r.RunInterrupted():
                self._interrupt(trial)
            case _:
                pass

    def _take_undecided(self, trial: TrialState, iteration: int | None = None) -> None:
        """Take in the result that has waited for its checkpoint, if it is of this iteration."""
        undecided = trial.undecided
        if undecided is None or (iteration is not None and undecided.iteration != iteration):
            return
        trial.undecided = None
        if trial.stopped is None:
            self._take_result(trial, undecided.result)

    def _take_result(self, trial: TrialState, result: dict[str, Any]) -> None:
        self._forget_decisions(trial)  # that were not taken when this was recorded: the journal wins
        stopper = self._policies.stopper
        trial.last_result = result
        if result["training_iteration"] <= trial.told_iteration:
            return
        trial.told_iteration = result["training_iteration"]
        self._is_waiting = False
        self._tell("on_trial_result", trial.trial_id, result)
        trial.is_long_enough = stopper is not None and self._call_stopper("__call__", trial.trial_id, result)
        if trial.is_long_enough:
            self._decide(trial, "stopper")
        else:
            answer = self._call_scheduler("on_trial_result", trial, result)
            if answer in (TrialScheduler.STOP, TrialScheduler.PAUSE):
                self._decide(trial, "scheduler", paused=answer == TrialScheduler.PAUSE)
        if stopper is not None and self._call_stopper("stop_all"):
            self.stop_all(_STOPPED_ALL)

    def stop_all(self, why: str) -> None:
        """Let no trial go on, and start none."""
        self.stop_why = self.stop_why or why
        for trial in self._live.values():
            if trial.status == Trial.RUNNING and trial.stopped is None and trial.trial_id not in self._stops:
                self._decide(trial, "experiment")

    def _decide(self, trial: TrialState, by: str, *, paused: bool = False) -> None:
        if not trial.is_finished():
            self._stops[trial.trial_id] = r.TrialStopped(
                at=self._now, trial=trial.trial_id, iteration=trial.summary.iteration, by=by, paused=paused
            )

    def _stop(self, trial: TrialState, record: r.TrialStopped) -> None:
        self._stops.pop(trial.trial_id, None)
        trial.stopped = record
        if record.paused:
            self._tell("on_pause", trial.trial_id)
            return
        self._is_waiting = False
        self._tell("on_trial_complete", trial.trial_id, trial.last_result or None)
        if record.by == "stop_trial":
            self._call_scheduler("on_trial_remove", trial)
        else:
            self._call_scheduler("on_trial_complete", trial, trial.last_result)
        if trial.status != Trial.RUNNING:
            trial.status = Trial.TERMINATED
            self._note_end(trial)

    def _reset(self, trial: TrialState, record: r.TrialReset) -> None:
        if record.idle:
            self._call_scheduler("on_idle")
        self._resets.pop(trial.trial_id, None)
        if trial.is_finished():
            self._call_scheduler("on_trial_add", trial)  # which has let go of it
        elif trial.stopped is not None and trial.stopped.paused:
            self._tell("on_unpause", trial.trial_id)
        trial.status, trial.stopped, trial.restart = Trial.PENDING, None, record.restart
        self._note_end(trial)

    def _clone(self, trial: TrialState, record: r.TrialCloned) -> None:
        _, config = self._clones.pop(trial.trial_id, (None, None))
        trial.config = self.configs.decode(record.config) if config is None else config
        self._start_from(trial, record.donor, record.checkpoint, record.at)
        if trial.status == Trial.RUNNING:
            trial.goes_on = True
            trial.stopped = trial.stopped or r.TrialStopped(
                at=record.at, trial=record.trial, iteration=record.iteration, by="scheduler", paused=True
            )
        else:
            trial.status, trial.stopped = Trial.PENDING, None

    def _start_from(self, trial: TrialState, donor_id: str, checkpoint: str, at: float) -> None:
        donor = self.trials[donor_id]
        if (stored := donor.summary.durable.checkpoints.get(checkpoint)) is not None:
            # Its result comes with the checkpoint: one that has nothing left to do is as far as its donor was then.
            point = donor.summary.curve.at(stored.iteration)
            row = Row(stored.iteration, point.at, stored.metrics, 0.0, point.total_s)
            trial.told_iteration, trial.last_result = stored.iteration, make_result(trial, row)
        self._set_source(trial, CloneSource(donor_id, donor.directory, checkpoint, f"{trial.trial_id} {at!r}"))

    def _set_source(self, trial: TrialState, source: CloneSource | None) -> None:
        """What a clone is to start from stays until it has."""
        if trial.source is not None:
            self.unpin_checkpoint(self.trials[trial.source.donor], trial.source.checkpoint)
        trial.source = source
        if source is not None:
            self.pin_checkpoint(self.trials[source.donor], source.checkpoint)

    def _end(self, trial: TrialState) -> None:
        """The trial's run has ended without an error."""
        if trial.stopped is not None:
            trial.status = _status_after(trial)
            return
        trial.status = Trial.TERMINATED
        self._forget_decisions(trial)
        self._is_waiting = False
        self._tell("on_trial_complete", trial.trial_id, trial.last_result or None)
        self._call_scheduler("on_trial_complete", trial, trial.last_result)

    def _forget_decisions(self, trial: TrialState) -> None:
        """It has ended, or gone on, before they were recorded."""
        self._stops.pop(trial.trial_id, None)
        self._clones.pop(trial.trial_id, None)

    def _fail(self, trial: TrialState) -> None:
        self._forget_decisions(trial)
        trial.status = Trial.ERROR
        if trial.stopped is None or trial.stopped.paused:  # otherwise they know that it has ended
            self._is_waiting = False
            self._tell("on_trial_complete", trial.trial_id, None, True)
            self._call_scheduler("on_trial_error", trial)
        if self._policies.fail_fast and not self.stop_why:
            self.failed_fast = trial
            self.stop_all(f"trial {trial.trial_id} failed, and FailureConfig(fail_fast) is set")

    # ------------------------------------------------------------ what is to be done

    def find_limit(self) -> str:
        """All records are read back: why the experiment has gone on long enough as a whole; "" if it has not."""
        stopper = self._policies.stopper
        if stopper is not None and self.trials:
            self._call_stopper("resume_after", self.elapsed_s)
            if self._call_stopper("stop_all"):
                return _STOPPED_ALL
        return self._budget_used_up if self.time_left_s == 0 else ""

    @property
    def time_left_s(self) -> float | None:
        """Of the time budget; None: there is none."""
        budget_s = self._policies.time_budget_s
        return None if budget_s is None else max(0.0, budget_s - self.elapsed_s)

    @property
    def _budget_used_up(self) -> str:
        return f"the time budget of {self._policies.time_budget_s:g} s is used up"

    def use_up_budget(self) -> None:
        """The time is over: let no trial go on."""
        self.stop_all(self._budget_used_up)

    def ask_stopper(self) -> None:
        """Time has passed, and perhaps no trial has reported anything: let none go on if the stopper says so."""
        if self._policies.stopper is not None and not self.stop_why and self._call_stopper("stop_all"):
            self.stop_all(_STOPPED_ALL)

    def stop_at_limit(self) -> None:
        """Let no trial go on if the experiment as a whole has gone on long enough."""
        if why := self.find_limit():
            self.stop_all(why)

    def take_over(self, trials: Iterable[TrialState]) -> None:
        """Know these from the beginning, none of which runs now."""
        for trial in trials:
            self.trials[trial.trial_id] = trial
            self._note_end(trial)
        self.resume()

    def resume(self) -> None:
        """All records are read back, and no trial runs: those that did go on, unless it was decided that they do
        not."""
        self._is_waiting = False
        for trial in list(self._live.values()):
            if trial.status != Trial.RUNNING or trial.trial_id in self._stops:
                continue
            if trial.stopped is None:
                self._interrupt(trial)
            else:
                trial.status = _status_after(trial)
                self._note_end(trial)

    def withdraw(self, trial: TrialState) -> None:
        """It was about to run when it was decided that it does not."""
        assert trial.stopped is not None
        trial.status = _status_after(trial)
        self._note_end(trial)

    def _interrupt(self, trial: TrialState) -> None:
        """It goes on when the experiment does."""
        trial.status = Trial.PENDING
        self._interrupted[trial.trial_id] = trial

    def next_trial(self, running: int, now: float) -> TrialState | r.TrialCreated | r.TrialReset | AskSearcher | None:
        """A trial to start while `running` others run, what is to be recorded first, or that the searcher is to be
        asked; None: nothing for now."""
        self._now = now
        if self.stop_why or self._asking is not None:
            return None
        if self._policies.scheduler.takes_turns and self._policies.total_trials is not None:
            created = self._suggest(now)
            if created is not None:
                return created
        if running >= self._policies.max_concurrent:
            return None
        while self._interrupted:
            trial = self._interrupted.pop(next(iter(self._interrupted)))
            if trial.status == Trial.PENDING:
                return trial
        chosen = self._call_scheduler("choose_trial_to_run")
        if chosen is not None:
            return self.trials[chosen.trial_id]
        created = self._suggest(now)
        return created if created is not None or running else self._leave_idleness()

    def _suggest(self, now: float) -> r.TrialCreated | AskSearcher | None:
        if self._is_exhausted or self._is_waiting or self._are_all_created:
            return None
        ask = self._asking = AskSearcher(f"{self.id}_{len(self.trials):05d}")
        return self.answer(ask, self.ask(ask), now) if self._policies.searcher.is_quick else ask

    def ask(self, ask: AskSearcher) -> dict[str, Any] | str | None:
        """The searcher's suggestion; called in any thread, but never twice at a time."""
        self.tell_searcher()
        suggestion: dict[str, Any] | str | None = self._call_searcher("suggest", ask.trial_id)
        return suggestion

    def answer(self, ask: AskSearcher, suggestion: dict[str, Any] | str | None, now: float) -> r.TrialCreated | None:
        """Take the searcher's suggestion in: what is to be recorded next, if there is a new trial."""
        assert ask == self._asking
        self._now, self._asking, trial_id = now, None, ask.trial_id
        if self.stop_why:
            return None
        if not isinstance(suggestion, dict):
            # Where something happened meanwhile, it may have another answer.
            self._is_exhausted, self._is_waiting = suggestion is not None, suggestion is None and not self._untold
            return None
        config = merge_configs(self._policies.constants, suggestion, self._policies.space)
        trial = TrialState(trial_id, config, number=len(self.trials))
        self._call_scheduler("on_trial_add", trial)
        name, directory = self._name_trial(trial)
        if (other := self._by_directory.get(directory)) is not None:
            raise ConfigError(
                f"TuneConfig(trial_dirname_creator) gave {directory!r} for trial {trial_id}, which is the directory of "
                f"trial {other}: make trial.trial_id a part of it."
            )
        self._suggested = trial
        told = None if self._policies.searcher.is_quick else self._told
        shorter = self._find_shorter(trial)
        return r.TrialCreated(
            at=now,
            trial=trial_id,
            config=self.configs.encode(trial.config),
            name=name,
            directory=directory,
            told=told,
            donor=None if shorter is None else shorter.trial_id,
            checkpoint=None if shorter is None else shorter.checkpoint,
        )

    def _find_shorter(self, trial: TrialState) -> TrialState | None:
        """Of the trials that have ended, and of which this is a longer version, the one that came farthest."""
        name = self._policies.budget
        if name is None:
            return None
        alike, budget = _split_budget(trial.config, name)
        found: list[tuple[int, TrialState]] = []
        for other in self._alike.get(alike, ()):
            newest = other.summary.durable.resume_point()
            if other.status == Trial.TERMINATED and newest is not None:
                other_budget = _split_budget(other.config, name)[1]
                if other_budget is not None and budget is not None and other_budget < budget:
                    found.append((newest.iteration, other))
        return max(found, key=lambda one: one[0], default=(0, None))[1]

    def _tell(self, method: str, *arguments: Any) -> None:
        """Tell the searcher, or note that it is to be told."""
        if self._policies.searcher.is_quick:
            self._call_searcher(method, *arguments)
        else:
            self._untold.append((method, arguments))
            if len(self._untold) > _UNTOLD_MAX and self._asking is None and self._are_all_created:
                self.tell_searcher()

    @property
    def _are_all_created(self) -> bool:
        total = self._policies.total_trials
        return total is not None and len(self.trials) >= total

    @property
    def has_untold(self) -> bool:
        """Whether the searcher was not told everything yet."""
        return bool(self._untold)

    def tell_searcher(self, limit: int | None = None) -> None:
        """Tell the searcher what it was not told yet; `limit`: until it was told of so many events in all."""
        while self._untold and (limit is None or self._told < limit):
            method, arguments = self._untold.popleft()
            self._told += 1
            getattr(self._policies.searcher, method)(*arguments)

    def _call_scheduler(self, method: str, *arguments: Any) -> Any:
        return _call("TuneConfig(scheduler)", self._policies.scheduler, method, self, *arguments)

    def _call_stopper(self, method: str, *arguments: Any) -> Any:
        return _call("RunConfig(stop)", self._policies.stopper, method, *arguments)

    def _call_searcher(self, method: str, *arguments: Any) -> Any:
        """One that is not quick is called in a thread, by who takes whatever it raises."""
        searcher = self._policies.searcher
        if not searcher.is_quick:
            return getattr(searcher, method)(*arguments)
        return _call("TuneConfig(search_alg)", searcher, method, *arguments)

    def _leave_idleness(self) -> r.TrialReset | None:
        """Nothing runs, and nothing new comes: paused trials must go on."""
        paused = [trial for trial in self._live.values() if trial.status == Trial.PAUSED]
        return r.TrialReset(at=self._now, trial=paused[0].trial_id, idle=True) if paused else None


def _call(field: str, component: object, method: str, *arguments: Any) -> Any:
    return call_user_code(field, f"{type(component).__name__}.{method}", getattr(component, method), *arguments)


def _split_budget(config: Mapping[str, Any], name: str) -> tuple[bytes, float | None]:
    """A configuration without its budget, to compare it by, and the budget."""
    budget = find_metric(config, name)
    rest: dict[str, Any] = {key: to_json(value) for key, value in config.items()}
    inside, keys = rest, name.split("/")
    for key in keys[:-1]:
        inside = inside[key] if isinstance(inside.get(key), dict) else {}
    inside.pop(keys[-1], None)
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    return msgspec.json.encode(rest, order="sorted"), float(budget) if is_number else None


def _status_after(trial: TrialState) -> str:
    """Of a trial that was stopped, once its workers have ended."""
    assert trial.stopped is not None
    if not trial.stopped.paused:
        return Trial.TERMINATED
    return Trial.PENDING if trial.goes_on else Trial.PAUSED

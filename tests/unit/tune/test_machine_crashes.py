"""The experiment's machine under crashes: whatever prefix of the journal survives, a new machine goes on as the old one
would have. Seeded; trials are records that a model makes, without processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.core import records as r
from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.failure_kind import FailureKind
from holdfast.errors import TuneError
from holdfast.tune.experiment.trial import Trial
from holdfast.tune.machine import AskSearcher, ExperimentMachine, Policies, TrialState
from holdfast.tune.schedulers.async_hyperband import AsyncHyperBandScheduler
from holdfast.tune.schedulers.hyperband import HyperBandScheduler
from holdfast.tune.schedulers.median_stopping_rule import MedianStoppingRule
from holdfast.tune.schedulers.pbt import PopulationBasedTraining
from holdfast.tune.schedulers.trial_scheduler import FIFOScheduler, TrialScheduler, configure_scheduler
from holdfast.tune.search.basic_variant import BasicVariantGenerator
from holdfast.tune.search.concurrency_limiter import ConcurrencyLimiter
from holdfast.tune.search.sample import uniform
from holdfast.tune.search.searcher import Searcher, configure_searcher
from holdfast.tune.search.variant_generator import grid_search
from holdfast.tune.stopper.resolve import make_stopper

ITERATIONS = 9
TRIALS = 12


def _make_pbt(synch: bool = False) -> PopulationBasedTraining:
    return PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        hyperparam_mutations={"x": uniform(0, 1)},
        synch=synch,
    )


SCHEDULERS: dict[str, Callable[[], TrialScheduler]] = {
    "fifo": FIFOScheduler,
    "asha": lambda: AsyncHyperBandScheduler(max_t=ITERATIONS, grace_period=1, reduction_factor=2),
    "median": lambda: MedianStoppingRule(time_attr="training_iteration", grace_period=2, min_samples_required=2),
    "hyperband": lambda: HyperBandScheduler(max_t=ITERATIONS),
    "pbt": _make_pbt,
    "synchronous pbt": lambda: _make_pbt(synch=True),
}


class Learner(Searcher):
    """Takes its time, and suggests from everything that it was told before."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        self.heard.append(trial_id)
        return {"x": random.Random(repr(self.heard)).random()}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self.heard.append((trial_id, result["training_iteration"], result["loss"]))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self.heard.append((trial_id, "ended"))

    def on_pause(self, trial_id: str) -> None:
        self.heard.append((trial_id, "paused"))

    def on_unpause(self, trial_id: str) -> None:
        self.heard.append((trial_id, "goes on"))


def make_machine(
    scheduler: str,
    max_concurrent: int,
    searcher: Searcher | None = None,
    *,
    lengths: bool = False,
    fail_fast: bool = False,
) -> ExperimentMachine:
    """With `lengths`, trials differ in how long they are, and in nothing else."""
    searcher, made = searcher or BasicVariantGenerator(), SCHEDULERS[scheduler]()
    space: dict[str, Any] = {"width": 3, **({"x": uniform(0, 1)} if searcher.is_quick else {})}
    if lengths:
        space = {"x": 0.5, "length": grid_search([3, ITERATIONS, 6])}
    constants = configure_searcher(searcher, "loss", "min", space, num_samples=TRIALS, seed=5)
    configure_scheduler(made, "loss", "min", seed=5)
    stopper = make_stopper(lambda _, result: result["loss"] < 0.02)
    policies = Policies(
        searcher, made, stopper, constants, TRIALS, max_concurrent, fail_fast, budget="length" if lengths else None
    )
    return ExperimentMachine("e", policies, lambda trial: (trial.trial_id, trial.trial_id))


@dataclass
class Model:
    """A driver and its trials. `journal` outlives it."""

    scheduler: str
    random: random.Random
    max_concurrent: int = 1
    journal: list[tuple[str, r.Record]] = field(default_factory=list)
    durable: int = 0
    """How many records are durable: something was done because of them."""
    due: int = 0
    """How many must be before the next step."""
    clock: float = 0.0
    learns: bool = False
    """The searcher takes its time: trials go on meanwhile."""
    lengths: bool = False
    """Trials differ in how long they are: a longer one starts from where a shorter one ended."""
    started: list[str] = field(default_factory=list)
    linked: dict[str, tuple[int, StoredCheckpoint]] = field(default_factory=dict)
    """The checkpoint that each trial was given last, in storage, with the index that it has there."""

    def now(self) -> float:
        self.clock += 1.0
        return self.clock

    def run(self, steps: int | None = None) -> bool:
        """Read the journal, and go on; False if it died before the experiment ended."""
        self.searcher = Learner() if self.learns else None
        self.answered: tuple[AskSearcher, Any] | None = None
        self.machine = make_machine(self.scheduler, self.max_concurrent, self.searcher, lengths=self.lengths)
        for run, record in self.journal:
            self.machine.apply(run, record)
        self.live: dict[str, TrialState] = {}
        self.record("e", r.ExperimentStarted(at=self.now(), epoch=1, host="here", pid=1))
        self.record_decided()
        self.machine.resume()
        while steps is None or steps > 0:
            steps = None if steps is None else steps - 1
            if not self.step():
                return True
        return False

    def crash(self) -> None:
        """Keep what is durable, and any part of the rest."""
        del self.journal[self.random.randint(self.durable, len(self.journal)) :]
        self.due = 0

    def step(self) -> bool:
        self.durable = max(self.durable, self.due)
        found = self.machine.next_trial(len(self.live), self.now())
        if isinstance(found, AskSearcher):
            self.answered = (found, self.machine.ask(found))
        elif self.answered is not None and (not self.live or self.random.random() < 0.3):
            ask, suggestion = self.answered
            self.answered = None
            if (created := self.machine.answer(ask, suggestion, self.now())) is not None:
                self.record("e", created)
                self.record_decided()
        elif isinstance(found, TrialState):
            self.start(found)
        elif found is not None:
            self.record("e", found)
            self.record_decided()
        elif self.live:
            self.go_on(self.random.choice(sorted(self.live)))
        else:
            return False
        return True

    def start(self, trial: TrialState) -> None:
        assert not trial.is_finished(), f"{trial.trial_id} had ended, and is started again"
        assert trial.trial_id not in self.live
        trial.status = Trial.RUNNING
        self.live[trial.trial_id] = trial
        self.started.append(trial.trial_id)
        source = trial.source
        if source is not None:
            donor = self.machine.trials[source.donor]
            assert source.checkpoint in donor.summary.durable.checkpoints, "a donor's checkpoint was removed"
            donated = donor.summary.durable.checkpoints[source.checkpoint]
            self.linked[trial.trial_id] = (trial.summary.durable.next_index, donated)
        self.record(trial.trial_id, r.ControllerStarted(at=self.now(), epoch=1, host="here", pid=1, workers=1))
        if trial.trial_id in self.linked:
            index, donated = self.linked[trial.trial_id]
            if trial.summary.durable.next_index <= index:  # storage has it, and the journal does not know
                self.commit(trial, donated.iteration, donated.generation, donated.metrics)
        newest = trial.summary.durable.resume_point()
        generation = trial.summary.durable.generation + 1
        iteration, name = (newest.iteration, newest.name) if newest is not None else (0, None)
        self.record(
            trial.trial_id,
            r.GenerationStarted(
                at=self.now(), generation=generation, world_size=1, agents=("a",), iteration=iteration, checkpoint=name
            ),
        )
        self.due = len(self.journal)

    def go_on(self, trial_id: str) -> None:
        """One more report, or the end of a trial."""
        trial = self.live[trial_id]
        length = trial.config.get("length", ITERATIONS)
        if trial.stopped is None and trial.summary.iteration < length:
            self.report(trial)
        elif trial.stopped is not None or trial.summary.iteration >= length:
            self.record(trial_id, r.RunFinished(at=self.now()))
            self.due = len(self.journal)
            del self.live[trial_id]

    def report(self, trial: TrialState) -> None:
        iteration, generation = trial.summary.iteration + 1, trial.summary.durable.generation
        metrics = {"loss": trial.config["x"] / iteration}
        self.record(
            trial.trial_id,
            r.Reported(at=self.now(), generation=generation, iteration=iteration, metrics=metrics, checkpoint=True),
        )
        self.record_decided()
        if trial.stopped is not None:
            self.due = len(self.journal)  # the worker learns of it once it is durable
        self.commit(trial, iteration, generation, metrics)
        if trial.stopped is not None:
            self.due = len(self.journal)

    def commit(self, trial: TrialState, iteration: int, generation: int, metrics: dict[str, Any]) -> None:
        """Only the newest checkpoint stays, and what is pinned."""
        index = trial.summary.durable.next_index
        name = f"checkpoint_{index:06d}"
        self.record(
            trial.trial_id,
            r.CheckpointCommitted(
                at=self.now(), name=name, index=index, iteration=iteration, generation=generation, metrics=metrics
            ),
        )
        self.record_decided()
        for older in [one for one in trial.summary.durable.checkpoints if one not in (name, *trial.pins)]:
            self.record(trial.trial_id, r.CheckpointDeleted(at=self.now(), name=older))

    def record(self, run: str, record: r.Record) -> None:
        self.journal.append((run, record))
        self.machine.apply(run, record)

    def record_decided(self) -> None:
        while decided := self.machine.decided:
            for record in decided:
                self.record("e", record)

    def outcome(self) -> list[tuple[str, dict[str, Any], str, int, Any]]:
        return [
            (trial.trial_id, trial.config, trial.status, trial.summary.iteration, trial.last_result.get("loss"))
            for trial in self.machine.trials.values()
        ]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", range(8))
def test_a_driver_that_dies_changes_nothing_with_one_trial_at_a_time(scheduler: str, seed: int) -> None:
    check_one_at_a_time(scheduler, seed)


@pytest.mark.parametrize("seed", range(8))
def test_a_longer_version_of_a_trial_starts_from_its_end_after_any_crash(seed: int) -> None:
    dying = check_one_at_a_time("fifo", seed, lengths=True)
    reported: dict[str, set[int]] = {trial: set() for trial in dying.machine.trials}
    for run, record in dying.journal:
        if isinstance(record, r.Reported):
            reported[run].add(record.iteration)
    done = [sorted(reported[trial]) for trial in dying.machine.trials]
    assert done[:4] == [[1, 2, 3], [4, 5, 6, 7, 8, 9], [4, 5, 6], [1, 2, 3]]
    assert done[4] == [7, 8, 9], "of several it starts from the one that came farthest"


def check_one_at_a_time(scheduler: str, seed: int, *, learns: bool = False, lengths: bool = False) -> Model:
    undisturbed = Model(scheduler, random.Random(0), learns=learns, lengths=lengths)
    assert undisturbed.run()
    dying = Model(scheduler, random.Random(seed), learns=learns, lengths=lengths)
    for _ in range(8):
        if dying.run(dying.random.randint(1, 40)):
            break
        dying.crash()
    assert dying.run()
    assert dying.outcome() == undisturbed.outcome()
    assert {trial.status for trial in dying.machine.trials.values()} == {Trial.TERMINATED}
    return dying


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", range(8))
def test_no_trial_is_lost_or_run_again_with_several_at_a_time(scheduler: str, seed: int) -> None:
    model = Model(scheduler, random.Random(seed), max_concurrent=4)
    configs: dict[str, dict[str, Any]] = {}
    stopped: dict[str, r.TrialStopped] = {}
    for _ in range(8):
        ended = model.run(model.random.randint(1, 60))
        if ended:
            break
        model.crash()
        for _, record in model.journal:
            if isinstance(record, r.TrialCreated):
                assert configs.setdefault(record.trial, record.config) == record.config
            elif isinstance(record, r.TrialStopped) and not record.paused:
                stopped[record.trial] = record
    assert model.run()
    assert len(model.machine.trials) == TRIALS
    assert {trial.status for trial in model.machine.trials.values()} == {Trial.TERMINATED}
    for trial_id, record in stopped.items():
        assert model.machine.trials[trial_id].summary.iteration <= record.iteration, "a decision was taken back"
    created = [record.trial for _, record in model.journal if isinstance(record, r.TrialCreated)]
    assert len(created) == len(set(created))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_searcher_learns_of_the_same_before_each_suggestion_after_any_crash(scheduler: str, seed: int) -> None:
    """Also of what happened while it was asked, in a thread."""
    check_learner(scheduler, seed)
    check_one_at_a_time(scheduler, seed, learns=True)


def check_learner(scheduler: str, seed: int) -> None:
    model = Model(scheduler, random.Random(seed), max_concurrent=4, learns=True)
    for _ in range(8):
        ended = model.run(model.random.randint(1, 60))
        heard = model.searcher.heard if model.searcher is not None else []
        again = Learner()
        machine = make_machine(scheduler, 4, again)
        for run, record in model.journal:
            machine.apply(run, record)
        known = len(again.heard)
        asked = [n for n, one in enumerate(heard) if one in machine.trials]
        assert again.heard == heard[:known] and known > max(asked, default=-1)
        if ended:
            break
        model.crash()
    assert model.run()
    assert {trial.status for trial in model.machine.trials.values()} == {Trial.TERMINATED}
    assert len(model.machine.trials) == TRIALS


def test_what_is_done_again_after_a_crash_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that averages results would count it twice."""
    told: list[tuple[str, int]] = []

    def note(_: Any, __: Any, trial: Trial, result: dict[str, Any]) -> str:
        told.append((trial.trial_id, result["training_iteration"]))
        return TrialScheduler.CONTINUE

    monkeypatch.setattr(FIFOScheduler, "on_trial_result", note)
    model = Model("fifo", random.Random(0))
    model.run(10)
    commits = [n for n, (_, record) in enumerate(model.journal) if isinstance(record, r.CheckpointCommitted)]
    del model.journal[commits[-1] :]  # the last report is there, and its checkpoint is not
    told.clear()
    assert model.run()
    assert len(told) == len(set(told))
    reports = [(run, record.iteration) for run, record in model.journal if isinstance(record, r.Reported)]
    assert len(reports) == len(set(reports)) + 1, "nothing was done again"


class Failing(Model):
    """Trials fail now and then, also while they are being stopped for a pause."""

    def go_on(self, trial_id: str) -> None:
        if self.random.random() >= 0.15:
            super().go_on(trial_id)
            return
        self.record(trial_id, r.RunFailed(at=self.now(), error="broken", error_type=FailureKind.TRAINING_FAILED))
        self.record_decided()
        self.due = len(self.journal)
        del self.live[trial_id]


@pytest.mark.parametrize("seed", range(40))
def test_a_bracket_does_not_wait_for_a_trial_that_fails_while_it_is_paused(seed: int) -> None:
    """Nobody would ever complete it: its trials would creep on, a report each time when nothing else can run."""
    model = Failing("hyperband", random.Random(seed), max_concurrent=1 + seed % 3)
    assert model.run(5_000)
    idle = [record for _, record in model.journal if isinstance(record, r.TrialReset) and record.idle]
    assert len(idle) <= 3
    assert all(trial.is_finished() for trial in model.machine.trials.values())


def test_a_searcher_learns_of_a_trial_that_fails_while_it_is_paused() -> None:
    """Otherwise a limit of suggestions would count it for ever."""
    limiter = ConcurrencyLimiter(BasicVariantGenerator(), 1)
    machine = make_machine("median", 1, limiter)
    created = machine.next_trial(0, 1.0)
    assert isinstance(created, r.TrialCreated)
    machine.apply("e", created)
    trial = machine.next_trial(0, 2.0)
    assert isinstance(trial, TrialState) and limiter.suggest("x") is None
    machine.apply(trial.trial_id, r.ControllerStarted(at=3.0, epoch=1, host="here", pid=1, workers=1))
    machine.apply("e", r.TrialStopped(at=4.0, trial=trial.trial_id, iteration=1, by="scheduler", paused=True))
    failed = r.RunFailed(at=5.0, error="broken", error_type=FailureKind.TRAINING_FAILED)
    machine.apply(trial.trial_id, failed)
    assert trial.status == Trial.ERROR
    assert isinstance(machine.next_trial(0, 6.0), r.TrialCreated)


def test_a_driver_that_died_while_all_were_to_stop_goes_on_with_them() -> None:
    """One trial's failure had stopped the others, which was not recorded any more."""
    machine = make_machine("fifo", 2, fail_fast=True)
    for running in (0, 1):
        created = machine.next_trial(running, 1.0)
        assert isinstance(created, r.TrialCreated)
        machine.apply("e", created)
        started = r.ControllerStarted(at=2.0, epoch=1, host="here", pid=1, workers=1)
        machine.apply(created.trial, started)
    failing, other = machine.trials.values()
    failed = r.RunFailed(at=3.0, error="broken", error_type=FailureKind.TRAINING_FAILED)
    machine.apply(failing.trial_id, failed)
    assert [record.trial for record in machine.decided] == [other.trial_id]
    machine.apply("e", r.ExperimentStarted(at=4.0, epoch=2, host="here", pid=2))
    assert not machine.decided
    machine.resume()
    assert machine.next_trial(0, 5.0) is other


# ------------------------------------------------------------ the model must notice what is broken


Patch = pytest.MonkeyPatch


def forget_decisions_that_were_not_recorded(patch: Patch) -> None:
    """A driver that died between a report and the record of what was decided by it."""
    resume = ExperimentMachine.resume

    def forgetful(self: ExperimentMachine) -> None:
        self._stops.clear()
        resume(self)

    patch.setattr(ExperimentMachine, "resume", forgetful)
    patch.setattr(Model, "record_decided", _record_decided_once_running)


def _record_decided_once_running(self: Model) -> None:
    while self.live and (decided := self.machine.decided):
        for record in decided:
            self.record("e", record)


def start_the_search_over(patch: Patch) -> None:
    patch.setattr(BasicVariantGenerator, "replay_suggestion", lambda *_: None)


def run_stopped_trials_again(patch: Patch) -> None:
    """The run of a trial was cut off after it was decided that it does not go on."""

    def resume(self: ExperimentMachine) -> None:
        for trial in self.trials.values():
            if trial.status == Trial.RUNNING:
                trial.status, trial.stopped = Trial.PENDING, None

    patch.setattr(ExperimentMachine, "resume", resume)


def run_finished_trials_again(patch: Patch) -> None:
    def end(self: ExperimentMachine, trial: TrialState) -> None:
        trial.status = Trial.PENDING

    patch.setattr(ExperimentMachine, "_end", end)


def fold_records_into_another_trial(patch: Patch) -> None:
    """A record of one run counts for another, when it is read back."""
    run = Model.run

    def confused(self: Model, steps: int | None = None) -> bool:
        reports = [n for n, (_, record) in enumerate(self.journal) if isinstance(record, r.Reported)]
        runs = sorted({self.journal[n][0] for n in reports})
        if len(runs) > 1:
            n = self.random.choice(reports)
            other = self.random.choice([one for one in runs if one != self.journal[n][0]])
            self.journal[n] = (other, self.journal[n][1])
        return run(self, steps)

    patch.setattr(Model, "run", confused)


def forget_results_of_the_scheduler(patch: Patch) -> None:
    """The scheduler learns of new results only, and not of what it was told before the crash."""
    take = ExperimentMachine._take_result

    def take_new(self: ExperimentMachine, trial: TrialState, result: dict[str, Any]) -> None:
        if self._now > 60:
            take(self, trial, result)

    patch.setattr(ExperimentMachine, "_take_result", take_new)


def pin_nothing(patch: Patch) -> None:
    """Retention removes a donor's checkpoint before the copy has it."""
    patch.setattr(ExperimentMachine, "pin_checkpoint", lambda *_: None)


def keep_the_configuration_of_a_clone(patch: Patch) -> None:
    clone = ExperimentMachine._clone

    def forgetful(self: ExperimentMachine, trial: TrialState, record: r.TrialCloned) -> None:
        before = trial.config
        clone(self, trial, record)
        trial.config = before

    patch.setattr(ExperimentMachine, "_clone", forgetful)


def ask_who_goes_on_after_a_crash(patch: Patch) -> None:
    """The scheduler may choose another trial than the one that ran."""

    def interrupt(self: ExperimentMachine, trial: TrialState) -> None:
        trial.status = Trial.PENDING

    patch.setattr(ExperimentMachine, "_interrupt", interrupt)


MUTANTS = [
    (forget_decisions_that_were_not_recorded, "asha"),
    (start_the_search_over, "asha"),
    (run_stopped_trials_again, "asha"),
    (run_finished_trials_again, "asha"),
    (fold_records_into_another_trial, "asha"),
    (forget_results_of_the_scheduler, "asha"),
    (pin_nothing, "pbt"),
    (keep_the_configuration_of_a_clone, "pbt"),
    (ask_who_goes_on_after_a_crash, "pbt"),
]


@pytest.mark.parametrize(
    ("mutant", "scheduler"), MUTANTS, ids=[f"{mutant.__name__} {scheduler}" for mutant, scheduler in MUTANTS]
)
def test_a_seed_finds_the_mutant(
    mutant: Callable[[Patch], None], scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = Model(scheduler, random.Random(0))
    assert undisturbed.run()
    mutant(monkeypatch)
    for seed in range(100):
        model = Model(scheduler, random.Random(seed))
        try:
            for _ in range(8):
                if model.run(model.random.randint(1, 40)):
                    break
                model.crash()
            assert model.run(2_000)
            assert model.outcome() == undisturbed.outcome()
        except (AssertionError, TuneError):
            return
    pytest.fail("no seed found it")


def test_a_seed_finds_that_a_searcher_is_told_too_much_when_records_are_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what happened while it was asked, which it did not know."""
    tell = ExperimentMachine.tell_searcher
    monkeypatch.setattr(ExperimentMachine, "tell_searcher", lambda self, limit=None: tell(self))
    with pytest.raises(AssertionError):
        for seed in range(100):
            check_learner("asha", seed)

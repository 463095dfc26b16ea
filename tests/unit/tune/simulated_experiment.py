"""A whole experiment in one thread: a searcher, a scheduler and a training step that is a function.

It keeps the order of calls that `trial_scheduler` describes, takes a while to pause a trial, has checkpoints
with a retention of one, and can replace the scheduler by a new one in between, as a restart does. A seed decides which
trial reports next and which one fails.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from holdfast.tune.experiment import Trial
from holdfast.tune.schedulers import FIFOScheduler, TrialScheduler
from holdfast.tune.schedulers.trial_scheduler import configure_scheduler
from holdfast.tune.search import BasicVariantGenerator, Searcher
from holdfast.tune.search.searcher import configure_searcher
from holdfast.tune.search.variant_generator import merge_configs
from holdfast.tune.serialization import from_json, to_json

__all__ = ["Experiment", "restart_by_replay", "restart_from_state"]

Step = Callable[[dict[str, Any], Any], tuple[Any, dict[str, Any]]]
"""Configuration and state (None at first), to the next state and what is reported."""


class Experiment:
    """`steps` counts the training steps of all trials; `decisions` says what the scheduler decided, in order."""

    def __init__(
        self,
        step: Step,
        space: dict[str, Any],
        scheduler: TrialScheduler | None = None,
        *,
        searcher: Searcher | None = None,
        num_samples: int = 8,
        slots: int = 2,
        max_steps: int = 16,
        seed: int = 0,
        failures: float = 0.0,
        restart: Callable[[Experiment], None] | None = None,
    ) -> None:
        self.step, self.slots, self.max_steps, self.failures = step, slots, max_steps, failures
        self.searcher = searcher or BasicVariantGenerator()
        self.scheduler = scheduler or FIFOScheduler()
        self.metric, self.mode, self.seed = "score", "max", seed
        constants = configure_searcher(self.searcher, self.metric, self.mode, space, num_samples=num_samples, seed=seed)
        self.constants = constants
        self.num_trials = self.searcher.total_trials(num_samples) or 0
        configure_scheduler(self.scheduler, self.metric, self.mode, seed=seed)
        self.restart = restart
        self.rng = random.Random(seed)
        self.trials: list[Trial] = []
        self.states: dict[str, Any] = {}
        self.done: dict[str, int] = {}
        """Training iterations by trial."""
        self.checkpoints: dict[tuple[str, str], tuple[Any, int]] = {}
        self.pinned: set[tuple[str, str]] = set()
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.pausing: dict[str, str] = {}
        """Trials whose workers are being stopped for a pause, and their status when that is done."""
        self.steps = 0
        self.decisions: list[tuple[Any, ...]] = []
        self.calls: list[dict[str, Any]] = []
        """If there are restarts: everything that the scheduler was told, with what it could see then."""

    # ------------------------------------------------------------ what schedulers call

    def get_trials(self) -> list[Trial]:
        return list(self.trials)

    def get_live_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.is_finished()]

    def stop_trial(self, trial: Trial) -> None:
        assert not trial.is_finished()
        self.decisions.append(("stop_trial", trial.trial_id))
        self.pausing.pop(trial.trial_id, None)
        self.end(trial, Trial.TERMINATED, "on_trial_remove")

    def unpause_trial(self, trial: Trial) -> None:
        self.decisions.append(("unpause_trial", trial.trial_id))
        if trial.trial_id in self.pausing:
            self.pausing[trial.trial_id] = Trial.PENDING
        else:
            assert trial.status == Trial.PAUSED
            trial.status = Trial.PENDING

    def pin_checkpoint(self, trial: Trial, checkpoint: str) -> None:
        assert (trial.trial_id, checkpoint) in self.checkpoints and (trial.trial_id, checkpoint) not in self.pinned
        self.pinned.add((trial.trial_id, checkpoint))

    def unpin_checkpoint(self, trial: Trial, checkpoint: str) -> None:
        self.pinned.remove((trial.trial_id, checkpoint))

    def exploit_trial(self, trial: Trial, donor: Trial, checkpoint: str, config: dict[str, Any]) -> None:
        assert trial.status in (Trial.RUNNING, Trial.PAUSED) and donor is not trial
        self.decisions.append(("exploit_trial", trial.trial_id, donor.trial_id, checkpoint, config))
        trial.config = config
        if trial.trial_id in self.pausing:
            self.pausing[trial.trial_id] = Trial.PENDING
        else:
            trial.status = Trial.PENDING
        self.commit(trial, *self.checkpoints[donor.trial_id, checkpoint])

    # ------------------------------------------------------------ the loop

    def run(self) -> Experiment:
        while True:
            if self.restart is not None:
                self.restart(self)
            self.start_trials()
            running = [trial for trial in self.trials if trial.status == Trial.RUNNING]
            if running:
                trial = self.rng.choice(running)
                if trial.trial_id in self.pausing:
                    trial.status = self.pausing.pop(trial.trial_id)
                else:
                    self.advance(trial)
            elif not self.get_live_trials():
                return self
            else:
                self.tell("on_idle")
                live = self.get_live_trials()
                assert not live or any(trial.status != Trial.PAUSED for trial in live), "a deadlock"

    def start_trials(self) -> None:
        while sum(trial.status == Trial.RUNNING for trial in self.trials) < self.slots:
            if not any(trial.status == Trial.PENDING for trial in self.trials):
                self.add_trial()
            trial = self.scheduler.choose_trial_to_run(self)
            if trial is None:
                return
            assert trial.status in (Trial.PENDING, Trial.PAUSED)
            trial.status = Trial.RUNNING
            state = (None, 0) if trial.checkpoint is None else self.checkpoints[trial.trial_id, trial.checkpoint]
            self.states[trial.trial_id], self.done[trial.trial_id] = state

    def add_trial(self) -> None:
        if len(self.trials) == self.num_trials:
            return
        trial_id = f"t{len(self.trials):03d}"
        suggestion = self.searcher.suggest(trial_id)
        if isinstance(suggestion, dict):
            trial = Trial(trial_id, merge_configs(self.constants, suggestion))
            self.trials.append(trial)
            self.tell("on_trial_add", trial)

    def advance(self, trial: Trial) -> None:
        self.steps += 1
        if self.rng.random() < self.failures:
            self.end(trial, Trial.ERROR, "on_trial_error")
            return
        state, metrics = self.step(trial.config, self.states[trial.trial_id])
        iteration = self.done[trial.trial_id] + 1
        self.states[trial.trial_id], self.done[trial.trial_id] = state, iteration
        self.commit(trial, state, iteration)
        result = {**metrics, "training_iteration": iteration, "trial_id": trial.trial_id}
        trial.last_result = result
        self.results.setdefault(trial.trial_id, []).append(result)
        self.searcher.on_trial_result(trial.trial_id, result)
        if iteration >= self.max_steps:
            self.end(trial, Trial.TERMINATED, "on_trial_complete", result)
            return
        decision = self.tell("on_trial_result", trial, result)
        if decision == TrialScheduler.STOP:
            self.end(trial, Trial.TERMINATED, "on_trial_complete", result)
        elif decision == TrialScheduler.PAUSE:
            self.pausing[trial.trial_id] = Trial.PAUSED
        else:
            assert decision in (TrialScheduler.CONTINUE, TrialScheduler.NOOP)

    def end(self, trial: Trial, status: str, told_by: str, *arguments: Any) -> None:
        trial.status = status
        self.tell(told_by, trial, *arguments)
        self.searcher.on_trial_complete(trial.trial_id, trial.last_result or None, error=status == Trial.ERROR)

    def commit(self, trial: Trial, state: Any, iteration: int) -> None:
        """Only the newest checkpoint of a trial stays, and what is pinned."""
        newest = f"checkpoint_{self.steps:06d}_{iteration}"
        older = trial.checkpoint
        if older is not None and older != newest and (trial.trial_id, older) not in self.pinned:
            del self.checkpoints[trial.trial_id, older]
        self.checkpoints[trial.trial_id, newest] = (state, iteration)
        trial.checkpoint = newest
        unpinned = [key for key in self.checkpoints if key not in self.pinned and key[0] == trial.trial_id]
        for key in unpinned:
            if key[1] != newest:
                del self.checkpoints[key]

    def tell(self, method: str, trial: Trial | None = None, *arguments: Any) -> Any:
        if self.restart is not None:
            seen = [(one.trial_id, one.status, dict(one.config), one.checkpoint) for one in self.trials]
            called = {"method": method, "trial": trial and trial.trial_id, "arguments": arguments, "seen": seen}
            self.calls.append(called)
        given = () if trial is None else (trial,)
        decision = getattr(self.scheduler, method)(self, *given, *arguments)
        self.decisions.append((method, trial and trial.trial_id, decision))
        return decision


# ------------------------------------------------------------------ restarts


def restart_from_state(experiment: Experiment) -> None:
    """A new scheduler, constructed from its stored arguments, gets the state of the old one."""
    state = json.loads(json.dumps(to_json(experiment.scheduler.get_state()), allow_nan=False))
    new = _constructed_again(experiment)
    new.set_state(from_json(state, "scheduler"))
    experiment.scheduler = new


def restart_by_replay(experiment: Experiment) -> None:
    """A new scheduler is told everything that the old one was told; what it decides is ignored."""
    new = _constructed_again(experiment)
    for call in experiment.calls:
        replay = _Replay(call["seen"])
        trial = [replay.find(call["trial"])] if call["trial"] else []
        getattr(new, call["method"])(replay, *trial, *call["arguments"])
    assert to_json(new.get_state()) == to_json(experiment.scheduler.get_state())
    experiment.scheduler = new


def _constructed_again(experiment: Experiment) -> TrialScheduler:
    made = from_json(json.loads(json.dumps(to_json(experiment.scheduler), allow_nan=False)), "scheduler")
    assert isinstance(made, TrialScheduler)
    configure_scheduler(made, experiment.metric, experiment.mode, seed=experiment.seed)
    return made


class _Replay:
    """The trials as they were at a call. What the scheduler has done happened already."""

    def __init__(self, seen: list[tuple[str, str, dict[str, Any], str | None]]) -> None:
        self.trials = [
            Trial(trial_id, config, status, checkpoint=checkpoint) for trial_id, status, config, checkpoint in seen
        ]

    def find(self, trial_id: str) -> Trial:
        return next(trial for trial in self.trials if trial.trial_id == trial_id)

    def get_trials(self) -> list[Trial]:
        return list(self.trials)

    def get_live_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.is_finished()]

    def stop_trial(self, trial: Trial) -> None:
        trial.status = Trial.TERMINATED

    def unpause_trial(self, trial: Trial) -> None:
        trial.status = Trial.PENDING

    def pin_checkpoint(self, trial: Trial, checkpoint: str) -> None:
        pass

    def unpin_checkpoint(self, trial: Trial, checkpoint: str) -> None:
        pass

    def exploit_trial(self, trial: Trial, donor: Trial, checkpoint: str, config: dict[str, Any]) -> None:
        trial.status = Trial.PENDING

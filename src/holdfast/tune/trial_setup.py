"""From a trial to its controller: a function is a run with one worker, a trainer a run with as many as it wants.

The function is pickled once for all trials, so that they share zygotes; a trial's configuration travels with its
workers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
from blake3 import blake3

from holdfast.checkpoint.link import link_checkpoint
from holdfast.control.agent_link import Preparation
from holdfast.control.job_pickle import pickle_config
from holdfast.control.lease import GuestLease, read_cuts
from holdfast.control.loop import ControllerSetup, RunOwner
from holdfast.control.request import RequestWords, TrainRequest
from holdfast.control.setup import agents_work_dir, make_guest_setup, make_preparation
from holdfast.core.masking import masked
from holdfast.errors import ConfigError, Damaged, NotCommitted, NotFound
from holdfast.journal.reader import JournalReader
from holdfast.storage.store import Store
from holdfast.storage.uri import join
from holdfast.train.request import build_request, plain_json
from holdfast.train.trainer import DataParallelTrainer
from holdfast.tune.config_codec import find_unstored
from holdfast.tune.machine import CloneSource, TrialState
from holdfast.tune.trial_files import TrialFiles
from holdfast.views.files.results import ResultFiles

__all__ = ["FunctionRequests", "TrainerRequests", "TrialRequests", "TrialSetup"]

_log = logging.getLogger(__name__)


class TrialRequests(Protocol):
    """How the trials of an experiment are run."""

    @property
    def base(self) -> TrainRequest:
        """What all trials have in common: resources above all."""
        ...

    def make(self, trial: TrialState) -> tuple[TrainRequest, Preparation]:
        """What one trial's agents are sent; names and places are filled in later."""
        ...


class FunctionRequests:
    """All trials call one function, each with its configuration."""

    def __init__(self, trainer: DataParallelTrainer) -> None:
        words = RequestWords("The trainable", "tune.with_resources")
        # Nearly every trial calls tune.report, whose import is large: once in the zygote, not in each worker.
        self.base = build_request(trainer, True, None, ("holdfast.tune.functions",), words)
        self._preparation = make_preparation(self.base)

    def make(self, trial: TrialState) -> tuple[TrainRequest, Preparation]:
        config, modules = pickle_config(trial.config, "param_space")
        run = msgspec.structs.replace(self._preparation.run, config=config, config_modules=modules)
        return self.base, replace(self._preparation, run=run)


class TrainerRequests:
    """Each trial is a run of a trainer; its configuration may have `train_loop_config` and `scaling_config`."""

    def __init__(self, trainer: DataParallelTrainer, configure: Callable[[DataParallelTrainer], None]) -> None:
        """`configure` gives a copy of the trainer what the experiment says."""
        self._trainer = trainer
        self._configure = configure
        self.base = self._request({})

    def make(self, trial: TrialState) -> tuple[TrainRequest, Preparation]:
        request = self._request(trial.config)
        return request, make_preparation(request)

    def _request(self, config: dict[str, Any]) -> TrainRequest:
        trainer = copy.copy(self._trainer)
        self._configure(trainer)
        for key, value in config.items():
            if key == "train_loop_config":
                trainer.train_loop_config = {**(trainer.train_loop_config or {}), **value}
            elif key == "scaling_config":
                trainer.scaling_config = value
            else:
                raise ConfigError(
                    f'param_space["{key}"]: of a trainer, "train_loop_config" and "scaling_config" can be searched; '
                    f'write param_space={{"train_loop_config": {{"{key}": ...}}}}.'
                )
        return build_request(trainer, trainer._takes_config, trainer._framework(), trainer._preload())


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """Makes what a trial's controller starts from."""

    requests: TrialRequests
    store: Store
    """The experiment's directory."""
    place: str
    """The same, as workers open it: a path or a URI."""
    experiment: str
    """The experiment's name."""
    awaits_decisions: bool
    """Whether anybody may stop a trial because of what it reports."""
    files: TrialFiles
    appends: bool
    """What `can_append` says of the store."""

    def __call__(self, trial: TrialState, lease: GuestLease, owner: RunOwner) -> ControllerSetup:
        if (unstored := find_unstored(trial.config)) is not None:
            raise ConfigError(
                f"Trial {trial.trial_id} cannot go on: its configuration has {unstored}, which could not be stored and "
                "is not in param_space: let functions and searchers give plain values."
            )
        request, preparation = self.requests.make(trial)
        place = join(self.place, trial.directory)
        run = msgspec.structs.replace(
            preparation.run,
            storage=place,
            experiment=self.experiment,
            trial_id=trial.trial_id,
            trial_dir=place,
            work_dir=agents_work_dir(request, self.place, trial.directory),
            awaits_decisions=self.awaits_decisions,
        )
        store = self.store.sub(trial.directory)
        if trial.source is not None:
            self._link(trial, trial.source, lease)
        journal = None
        if trial.is_started:
            journal = JournalReader(self.store, read_cuts(self.store), trial.trial_id, shared=True)
        files = ResultFiles(
            store,
            journal,
            epoch=lease.epoch,
            params=masked("", plain_json(trial.config)),
            fenced=lease.is_fenced,
            appends=self.appends,
        )
        setup = make_guest_setup(
            request,
            replace(preparation, run=run),
            store,
            trial.trial_id,
            trial.summary,
            lease,
            owner,
            holder=self.store,
            has_checkpoint=trial.source is not None,
            restart=trial.restart,
        )
        self.files.expect(trial.trial_id, files)
        return setup

    def _link(self, trial: TrialState, source: CloneSource, lease: GuestLease) -> None:
        """Make the donor's checkpoint the trial's newest; what a crash left of that is found by its token."""
        lease.make_fence()
        token = blake3(source.decision.encode()).hexdigest()[:32]
        try:
            link_checkpoint(
                self.store,
                source.directory,
                source.checkpoint,
                trial.directory,
                epoch=lease.epoch,
                at_least=lease.floor,
                token=token,
            )
        except (NotCommitted, NotFound, Damaged) as error:
            _log.warning(
                "Trial %s goes on from its own checkpoint, since the one that it was to get cannot be read: %s",
                trial.trial_id,
                error,
            )

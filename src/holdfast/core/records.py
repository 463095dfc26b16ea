"""The records of a run's journal: what is durable. Folding them (`state.fold`) gives the run's state back.

Each is one line of JSON in storage, tagged by `kind`, stamped with `at` (seconds since 1970). Views for people
(progress, story, result files, goodput) are made from records and from nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.checkpoint_types import ValidationStatus, ValidationTask
from holdfast.core.failure_kind import FailureKind

__all__ = [
    "AgentAdded",
    "AgentRefused",
    "AgentRemoved",
    "BoundsChanged",
    "ChangePlanned",
    "CheckpointAbandoned",
    "CheckpointCommitted",
    "CheckpointDamaged",
    "CheckpointDeleted",
    "CheckpointValidated",
    "ControllerStarted",
    "DrainStarted",
    "ExperimentEnded",
    "ExperimentStarted",
    "GenerationEnded",
    "GenerationRunning",
    "GenerationStarted",
    "Preemption",
    "RaisedError",
    "RanksLagging",
    "RanksReported",
    "Record",
    "RemovalFailed",
    "Reported",
    "RunFailed",
    "RunFinished",
    "RunInterrupted",
    "RunRestarted",
    "TrialCloned",
    "TrialCreated",
    "TrialReset",
    "TrialStopped",
    "ValidationRequested",
    "WorkerFailure",
]


class _Record(msgspec.Struct, frozen=True, tag=True, tag_field="kind", omit_defaults=True):
    pass


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one rank died: from the worker's exception, or from its wait status, to what users see.

    The worker says what it knows (`worker.failure`), its agent adds the rest (`agent.worker_group`)."""

    rank: int
    cause: str
    """The rest of a sentence: "raised ValueError: ...", "was killed by SIGKILL", "called sys.exit(0)"."""
    agent: str = ""
    host: str = ""
    kind: FailureKind = FailureKind.OTHER
    damaged_checkpoint: str | None = None
    """With `kind` DAMAGED: the name of the run's checkpoint that could not be loaded, if it was one of the run's."""
    error_type: str | None = None
    error: str | None = None
    traceback: str | None = None
    signal: int | None = None
    last_lines: tuple[str, ...] = ()


class RaisedError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception that a user's code raised in the driver."""

    where: str
    """The class and the method, as in "Listener.after_report"."""
    error_type: str
    error: str
    traceback: str = ""


class Preemption(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Nodes that are taken away while a generation has workers there."""

    ranks: dict[str, tuple[int, ...]]
    """Of each such agent."""
    deadline: float | None = None
    """When the first of them will be gone, where that is known."""
    timed_out: bool = False
    """The workers were stopped at that time, without a last checkpoint."""


class ControllerStarted(_Record, frozen=True, kw_only=True):
    """A controller took the run on; the first one starts it, later ones continue it."""

    at: float
    epoch: int
    host: str
    pid: int
    workers: int
    """The most that its script asks for."""
    workers_min: int | None = None
    """The fewest, of an elastic run; None: the same."""
    score_attribute: str | None = None
    score_order: str = "max"
    num_to_keep: int | None = None
    fingerprint: dict[str, Any] = {}
    changes: tuple[str, ...] = ()
    """What differs from the script and configuration of the controller before. A finished run is reopened by it."""


class RunRestarted(_Record, frozen=True, kw_only=True):
    """Training starts over from nothing: what was reported before belongs to another curve, and no checkpoint with an
    index below `first_index` is resumed from."""

    at: float
    first_index: int


class AgentAdded(_Record, frozen=True, kw_only=True, tag="AgentHere"):
    """An agent joined the run (`events.AgentJoined`). The tag is the record's name in journals."""

    at: float
    agent: str
    host: str
    slots: int
    spare: bool = False
    """The run's workers have places without it: it is kept idle, in case that another agent is lost."""


class AgentRefused(_Record, frozen=True, kw_only=True):
    """An agent was there that the run could not use (`events.AgentRefused`)."""

    at: float
    agent: str
    why: str


class AgentRemoved(_Record, frozen=True, kw_only=True, tag="AgentGone"):
    """The run lost an agent (`events.AgentLost`)."""

    at: float
    agent: str
    host: str
    why: str
    counted: bool = False
    """It was lost while it prepared the training function, when the run could not go on without: that is a failure of
    the run like a generation's."""


class BoundsChanged(_Record, frozen=True, kw_only=True):
    """The run may have other numbers of workers than its script asks for (`events.BoundsRequested`)."""

    at: float
    workers_min: int
    workers_max: int
    why: str


class DrainStarted(_Record, frozen=True, kw_only=True):
    """An agent is to be taken away (`events.AgentDraining`); once more where its deadline has become an earlier one."""

    at: float
    agent: str
    host: str
    why: str
    deadline: float | None = None
    """When it will be gone; None: it stays until its workers have moved."""


class ChangePlanned(_Record, frozen=True, kw_only=True):
    """The generation is to end at its next checkpoint, and another to go on from there. That is no failure."""

    at: float
    generation: int
    why: str


class GenerationStarted(_Record, frozen=True, kw_only=True):
    """Workers are being started from `checkpoint`; reports beyond `iteration` are superseded from here on."""

    at: float
    generation: int
    world_size: int
    agents: tuple[str, ...]
    iteration: int
    checkpoint: str | None = None


class GenerationRunning(_Record, frozen=True, kw_only=True):
    """Every worker of the generation is running."""

    at: float
    generation: int
    pids: dict[int, int] = {}
    """The process of each rank, on its node."""


class Reported(_Record, frozen=True, kw_only=True):
    """One report of rank 0."""

    at: float
    generation: int
    iteration: int
    metrics: dict[str, Any]
    checkpoint: bool = False
    stall_s: float = 0.0


class RanksReported(_Record, frozen=True, kw_only=True):
    """Every rank has made the report of this iteration, for a run with callbacks and several ranks: what each reported,
    in the order of ranks."""

    at: float
    generation: int
    iteration: int
    metrics: tuple[dict[str, Any], ...]
    checkpoint: bool = False
    """Some rank gave one, which is committed or given up later."""


class CheckpointCommitted(_Record, frozen=True, kw_only=True):
    at: float
    name: str
    index: int
    iteration: int
    generation: int
    metrics: dict[str, Any]
    size_bytes: int = 0
    uploaded_bytes: int = 0
    elapsed_s: float = 0.0
    token: str = ""


class ValidationRequested(_Record, frozen=True, kw_only=True):
    """The checkpoint of this iteration is to be validated once it is committed."""

    at: float
    generation: int
    iteration: int
    task: ValidationTask


class CheckpointValidated(_Record, frozen=True, kw_only=True):
    """The validation of a checkpoint has ended; the metrics that it gave count as the checkpoint's own."""

    at: float
    name: str
    token: str
    status: ValidationStatus
    metrics: dict[str, Any] = {}
    error: str = ""


class CheckpointAbandoned(_Record, frozen=True, kw_only=True):
    """A reported checkpoint that will never be committed."""

    at: float
    generation: int
    iteration: int
    why: str


class CheckpointDamaged(_Record, frozen=True, kw_only=True):
    """A committed checkpoint that does not verify: it is left where it is, and no longer used."""

    at: float
    name: str
    why: str


class CheckpointDeleted(_Record, frozen=True, kw_only=True):
    """This checkpoint is gone: by the retention rule, unless `why` says otherwise."""

    at: float
    name: str
    why: str = ""


class RemovalFailed(_Record, frozen=True, kw_only=True):
    """Retention could not remove this checkpoint; it will be tried again."""

    at: float
    name: str
    why: str


class RanksLagging(_Record, frozen=True, kw_only=True):
    """A checkpoint waits for these ranks, which have not called `report` as often as the others."""

    at: float
    generation: int
    number: int
    ranks: tuple[int, ...]


class GenerationEnded(_Record, frozen=True, kw_only=True):
    """All workers of the generation are gone. `counted` says whether this spent one of the run's failures."""

    at: float
    generation: int
    why: str
    detected_at: float
    iteration: int
    """How far training had come; the next GenerationStarted tells how much of it is kept."""
    counted: bool = False
    failures: tuple[WorkerFailure, ...] = ()
    planned: bool = False
    """It ended on purpose, for another size or to leave an agent (`ChangePlanned`)."""
    bug_at: int | None = None
    """After which iteration of its rank the user's code raised the root cause, where that may well be a bug."""
    preemption: Preemption | None = None
    """What was taken away, if that ended the generation: it spent one of the run's preemptions, and no failure."""


class RunFinished(_Record, frozen=True, kw_only=True):
    at: float
    return_value: Any = None
    return_value_error: str | None = None


class RunFailed(_Record, frozen=True, kw_only=True):
    at: float
    error: str
    error_type: FailureKind = FailureKind.TRAINING_FAILED
    failures: tuple[WorkerFailure, ...] = ()
    raised: RaisedError | None = None
    """By a callback, if that ended the run."""
    preemption: Preemption | None = None
    """The last one, if that was one too many."""


class RunInterrupted(_Record, frozen=True, kw_only=True):
    """Stopped on purpose; the same call continues it."""

    at: float
    why: str


class ExperimentStarted(_Record, frozen=True, kw_only=True):
    """A controller took a tuning experiment on. Records of experiments carry the experiment's id as their run; those of
    its trials, which are runs, stand in the same journal under the trials' ids."""

    at: float
    epoch: int
    host: str
    pid: int
    settings: dict[str, Any] = {}
    """What the experiment was made with, as far as JSON can say it (`tune.serialization`)."""


class TrialCreated(_Record, frozen=True, kw_only=True):
    """A configuration was chosen for a new trial, which starts once this is durable."""

    at: float
    trial: str
    config: dict[str, Any]
    directory: str
    """The name of the trial's directory, below the experiment's."""
    name: str = ""
    told: int | None = None
    """Of a searcher that is asked in a thread: of how many events it had been told by then."""
    donor: str | None = None
    """A trial with the same configuration that was to go on for less time: this one starts from its checkpoint."""
    checkpoint: str | None = None


class TrialStopped(_Record, frozen=True, kw_only=True):
    """It was decided that the trial does not go on after its report of this iteration."""

    at: float
    trial: str
    iteration: int
    by: str
    """"stopper", "scheduler" or "experiment": who decided it."""
    paused: bool = False
    """The trial may go on later."""


class TrialReset(_Record, frozen=True, kw_only=True):
    """A trial that had failed or was paused is to run again: on from its newest checkpoint, or from the beginning."""

    at: float
    trial: str
    restart: bool = False
    idle: bool = False
    """Nothing ran, and nothing new could come: the scheduler was asked which paused trials go on. Others of these
    follow in records of their own."""


class TrialCloned(_Record, frozen=True, kw_only=True):
    """A trial goes on from a checkpoint of another one, the donor, with this configuration. Until the trial has that
    checkpoint, retention leaves it alone."""

    at: float
    trial: str
    iteration: int
    """How far the trial had come by itself; it does not go on from there."""
    donor: str
    checkpoint: str
    config: dict[str, Any]


class ExperimentEnded(_Record, frozen=True, kw_only=True):
    """No trial runs, and none is to be started; `why` says what stopped the experiment before its time, if anything
    did."""

    at: float
    why: str = ""


Record = (
    ControllerStarted
    | RunRestarted
    | AgentAdded
    | AgentRefused
    | AgentRemoved
    | BoundsChanged
    | DrainStarted
    | ChangePlanned
    | GenerationStarted
    | GenerationRunning
    | Reported
    | RanksReported
    | CheckpointCommitted
    | ValidationRequested
    | CheckpointValidated
    | CheckpointAbandoned
    | CheckpointDamaged
    | CheckpointDeleted
    | RemovalFailed
    | RanksLagging
    | GenerationEnded
    | RunFinished
    | RunFailed
    | RunInterrupted
    | ExperimentStarted
    | TrialCreated
    | TrialStopped
    | TrialReset
    | TrialCloned
    | ExperimentEnded
)

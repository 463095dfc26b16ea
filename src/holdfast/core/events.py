"""What happened: everything that the machine can be told, in the past tense.

Those that happen on a node are messages as well: the agent sends them, and the controller hands them to the machine as
they are (`wire.messages.AgentMessage`). The controller makes the others itself.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.checkpoint_types import Report, StoredCheckpoint, ValidationStatus
from holdfast.core.failure_kind import FailureKind
from holdfast.core.records import RaisedError, WorkerFailure

__all__ = [
    "AgentDraining",
    "AgentJoined",
    "AgentLost",
    "AgentPrepared",
    "AgentRefused",
    "AgentUnavailable",
    "BoundsRequested",
    "CallbackFailed",
    "CallbacksFinished",
    "CheckpointFailed",
    "CheckpointKept",
    "CheckpointRemoved",
    "CheckpointStored",
    "ControllerBegan",
    "ControllerFenced",
    "DamageFound",
    "Event",
    "PinsFound",
    "PlacesTaken",
    "RankReported",
    "SetAsideAnswered",
    "StopRequested",
    "StorageLost",
    "Ticket",
    "TimePassed",
    "ValidationFinished",
    "WorkerExited",
    "WorkerFinished",
    "WorkerWaited",
    "WorkersStarted",
    "WorkersStopped",
]


class Ticket(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names a reported checkpoint before it has a name: the n-th report of a generation."""

    generation: int
    number: int


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Tagged by class name."""


class ControllerBegan(_Event, frozen=True, kw_only=True):
    """This controller holds the lease; `stored` is what storage really has, `damaged` what does not verify, and
    `pinned` the names of what must not be removed."""

    epoch: int
    host: str
    pid: int
    fingerprint: dict[str, Any] = {}
    stored: tuple[StoredCheckpoint, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()
    pinned: tuple[str, ...] = ()
    next_index: int = 0
    changes: tuple[str, ...] = ()
    """What differs from the script and configuration that the run had last: a finished run then goes on."""
    restart: bool = False
    """Train from the beginning, without a checkpoint, although the run is there."""


class AgentJoined(_Event, frozen=True, kw_only=True):
    """The first message of an agent: who it is, and what it has for workers."""

    agent: str
    host: str
    slots: int
    """How many workers it can hold; 0 in the message: any number. The core is told how many the run may place there."""
    resources: dict[str, float] = {}
    """CPU, memory (in bytes) and custom resources."""
    gpus: tuple[str, ...] = ()
    """The ids of its GPUs."""
    address: str = ""
    """At which other nodes reach this one."""
    pid: int = 0
    torch: str | None = None
    """The version that is installed; "": none is. None: that of the driver."""


class AgentRefused(_Event, frozen=True, kw_only=True):
    """An agent is there that the run cannot use."""

    agent: str
    why: str
    """A sentence for a person."""


class AgentPrepared(_Event, frozen=True, kw_only=True):
    """The agent can start workers now: forked from its zygote, or, with a reason, as fresh processes."""

    agent: str
    cold_reason: str | None = None
    master_port: int = 0
    """A port on which the agent listens already, for rank 0 of the run's next generation."""
    snapshot_port: int = 0
    """Where other agents may read what this one has in memory of the run's checkpoints; 0: nowhere."""


class AgentLost(_Event, frozen=True, kw_only=True):
    """The agent's process or its connection is gone."""

    agent: str
    why: str


class AgentDraining(_Event, frozen=True, kw_only=True):
    """The agent is to be taken away: it gets no new workers, and those that it has move at their next checkpoint, if
    other agents have room for them. May come again, with an earlier deadline."""

    agent: str
    why: str
    deadline_s: float | None = None
    """It is gone in so many seconds from now; None: it stays until its workers have moved."""


class AgentUnavailable(_Event, frozen=True, kw_only=True):
    """The engine could not start an agent that was asked for."""

    slots: int
    why: str


class PlacesTaken(_Event, frozen=True, kw_only=True):
    """There are agents that could hold the run's workers, but other runs have the places: this run waits for its
    turn."""


class WorkersStarted(_Event, frozen=True, kw_only=True):
    """All workers of the generation on this agent are running."""

    generation: int
    agent: str
    pids: dict[int, int] = {}
    """The process of each rank."""


class DamageFound(_Event, frozen=True, kw_only=True):
    """An agent verified the checkpoint that its workers were to start from, and it is not what was committed. No worker
    was started there."""

    generation: int
    agent: str
    checkpoint: str
    why: str


class RankReported(_Event, frozen=True, kw_only=True):
    """What one rank reported since the last such event, in order."""

    generation: int
    rank: int
    reports: tuple[Report, ...]


class WorkerWaited(_Event, frozen=True, kw_only=True):
    """A rank began or ceased to wait for storage; as long as it waits, it is not hung."""

    generation: int
    rank: int
    waiting: bool
    until_report: int | None = None
    """It waits until every checkpoint up to this report of its own is committed or given up, whichever ranks gave it:
    how that stands is answered by `AnnounceSettled`."""
    until_validated: bool = False
    """And until none of the run's checkpoints waits for its validation."""


class WorkerFinished(_Event, frozen=True, kw_only=True):
    """The training function returned. `value` is plain data, or None with `value_error` saying why not."""

    generation: int
    rank: int
    value: Any = None
    value_error: str | None = None


class WorkerExited(_Event, frozen=True, kw_only=True):
    """A worker died without finishing, for whatever reason."""

    generation: int
    failure: WorkerFailure


class WorkersStopped(_Event, frozen=True, kw_only=True):
    """Nothing of this generation is alive on that agent."""

    generation: int
    agent: str
    master_port: int = 0
    """For the next generation, as in `AgentJoined`; 0: as it was."""


class CheckpointStored(_Event, frozen=True, kw_only=True):
    ticket: Ticket
    stored: StoredCheckpoint
    uploaded_bytes: int = 0
    elapsed_s: float = 0.0


class CheckpointFailed(_Event, frozen=True, kw_only=True):
    """`fatal`: trying again would fail the same way, and the user must act."""

    ticket: Ticket
    error: str
    kind: FailureKind = FailureKind.STORAGE
    fatal: bool = False


class PinsFound(_Event, frozen=True, kw_only=True):
    """Which of the run's checkpoints are pinned; `error` if storage could not tell."""

    pinned: tuple[str, ...] = ()
    error: str | None = None


class CheckpointRemoved(_Event, frozen=True, kw_only=True):
    """The checkpoint of this name and token is gone; `by_others`: it was before we came to it."""

    name: str
    token: str
    by_others: bool = False


class CheckpointKept(_Event, frozen=True, kw_only=True):
    """The checkpoint of this name and token was not removed: it is pinned, or `error` says what failed."""

    name: str
    token: str
    pinned: bool = False
    error: str = ""
    invisible: bool = False
    """Its manifest is gone, so that no reader finds it any more; files of it are left."""


class ValidationFinished(_Event, frozen=True, kw_only=True):
    """The validation of a checkpoint has ended: with metrics, or with what went wrong."""

    name: str
    token: str
    status: ValidationStatus
    metrics: dict[str, Any] = {}
    error: str = ""


class CallbackFailed(_Event, frozen=True, kw_only=True):
    """A callback of the user's raised: the run must end."""

    raised: RaisedError


class CallbacksFinished(_Event, frozen=True, kw_only=True):
    """The callbacks have been called for everything up to `FinishCallbacks`."""

    generation: int


class StorageLost(_Event, frozen=True, kw_only=True):
    """The journal itself cannot be written any more."""

    error: str
    kind: FailureKind = FailureKind.STORAGE


class ControllerFenced(_Event, frozen=True, kw_only=True):
    """A newer controller took over."""

    why: str


class StopRequested(_Event, frozen=True, kw_only=True):
    """`force`: do not wait for workers or uploads."""

    why: str
    force: bool = False
    grace_s: float = 0.0
    """How long to wait for a last checkpoint, where one can be expected."""


class BoundsRequested(_Event, frozen=True, kw_only=True):
    """Somebody wants the run to have at least and at most so many workers from now on."""

    workers_min: int
    workers_max: int
    why: str


class SetAsideAnswered(_Event, frozen=True, kw_only=True):
    """The agents of this host are drained, as was said before this; or there is no room without them."""

    host: str


class TimePassed(_Event, frozen=True, kw_only=True):
    """The machine's own deadline (see `machine.deadline`) has come."""


class ControllerStalled(_Event, frozen=True, kw_only=True):
    """The controller's own process stood still for so long (it was stopped, or its machine was): nobody's silence in
    that time means anything."""

    stalled_s: float


Event = (
    ControllerBegan
    | AgentJoined
    | AgentPrepared
    | AgentRefused
    | AgentLost
    | AgentDraining
    | AgentUnavailable
    | PlacesTaken
    | WorkersStarted
    | DamageFound
    | RankReported
    | WorkerWaited
    | WorkerFinished
    | WorkerExited
    | WorkersStopped
    | CheckpointStored
    | CheckpointFailed
    | PinsFound
    | CheckpointRemoved
    | CheckpointKept
    | ValidationFinished
    | CallbackFailed
    | CallbacksFinished
    | StorageLost
    | ControllerFenced
    | ControllerStalled
    | StopRequested
    | BoundsRequested
    | SetAsideAnswered
    | TimePassed
)

"""What must be done: everything that the machine can ask of its shell, in the imperative.

Those for agents are sent to them as they are (`wire.messages.ControllerMessage`), each agent's own share of them.
Commands run after the records of the same step are durable. All are idempotent: the shell may be asked twice.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from holdfast.core.checkpoint_types import Validation, ValidationTask
from holdfast.core.events import Ticket
from holdfast.core.records import Preemption

__all__ = [
    "AnnounceCheckpoint",
    "AnnouncePreemption",
    "AnnounceSettled",
    "ChangeBounds",
    "Command",
    "DeleteCheckpoint",
    "EndRun",
    "FindPins",
    "FinishCallbacks",
    "HoldReports",
    "Neighbour",
    "PersistCheckpoint",
    "Place",
    "ReleasePlaces",
    "RequestAgents",
    "RunStatus",
    "RunValidation",
    "SetHostAside",
    "StartWorkers",
    "StopWorkers",
]


class RunStatus(enum.StrEnum):
    """How a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Stopped on purpose; the same call continues it."""
    FENCED = "fenced"
    """Another controller took the run over; how it stands is that one's to say."""


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Tagged by class name."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's share of a generation."""

    agent: str
    node_rank: int
    ranks: tuple[int, ...]
    gpus: tuple[tuple[str, ...], ...] = ()
    """The ids of the GPUs of each of these ranks, where workers were given any."""


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """Another agent that may have files of a checkpoint in memory, and where it gives them."""

    agent: str
    address: str
    port: int


class RequestAgents(_Command, frozen=True, kw_only=True):
    """Have the engine bring agents with so many more slots in all."""

    slots: int


class StartWorkers(_Command, frozen=True, kw_only=True):
    """Start a generation. Each agent is sent this with its own place only, and answers `WorkersStarted` or
    `DamageFound`."""

    generation: int
    world_size: int
    places: tuple[Place, ...]
    node_count: int
    checkpoint: str | None
    """Name of the committed checkpoint to resume from."""
    token: str = ""
    """That checkpoint's token: a name may have been another one's before."""
    neighbours: tuple[Neighbour, ...] = ()
    """Which agents may have it in memory, where nodes do not share the run's storage."""
    iteration: int
    restart_count: int
    master_address: str = ""
    """Where rank 0 listens."""
    master_port: int = 0
    has_validation: bool = False
    """There is a function that validates checkpoints."""
    all_metrics: bool = False
    """Every rank sends the metrics that it reports, not only rank 0."""


class StopWorkers(_Command, frozen=True, kw_only=True):
    """Kill what is left of the generation on these agents; each answers `WorkersStopped`. Parts that workers have
    reported stay for their upload."""

    generation: int
    agents: tuple[str, ...] = ()
    dump_stacks: bool = False


class HoldReports(_Command, frozen=True, kw_only=True):
    """Have the ranks of the generation stay in reports, because it is about to end (`core.planned_change`)."""

    generation: int
    number: int | None
    """In every report from this number on; 0: in the next one that carries a checkpoint. Ranks that stay in an earlier
    one go on. None: nobody stays any more."""
    agents: tuple[str, ...] = ()


class PersistCheckpoint(_Command, frozen=True, kw_only=True):
    """Reserve, have agents upload the ranks' parts, commit; answered by `CheckpointStored` or `CheckpointFailed`."""

    ticket: Ticket
    parts: tuple[tuple[int, str], ...]
    """(rank, agent) of every rank that gave files."""
    file_names: dict[int, tuple[str, ...]] = {}
    """What the files of each rank are called, where there is more than one rank."""
    name: str | None
    adopt: bool
    at_least_index: int
    world_size: int
    iteration: int
    metrics: dict[str, Any]
    worker_states: dict[int, bytes] = {}
    """What Holdfast saves of each rank that sent something (`Report.worker_state`)."""


class AnnounceCheckpoint(_Command, frozen=True, kw_only=True):
    """Tell the agents, and so their workers, that the ticket's checkpoint is committed under `name`, or (None) given
    up: its parts are not needed any more."""

    ticket: Ticket
    name: str | None
    token: str = ""
    """The committed checkpoint's."""
    agents: tuple[str, ...] = ()


class AnnounceSettled(_Command, frozen=True, kw_only=True):
    """Tell a rank that waits (`WorkerWaited.until_report`) how the checkpoints up to that report stand: now, once no
    rank lags any more, and once they are settled."""

    generation: int
    rank: int
    until_report: int
    lagging: tuple[int, ...] = ()
    """The ranks that have not reported so often: they may give another checkpoint."""
    settled: bool = False
    """All of them are committed or given up, and there will be no other."""
    validations: dict[str, Validation] = {}
    """Of the run's checkpoints that were to be validated, by name."""
    agents: tuple[str, ...] = ()


class AnnouncePreemption(_Command, frozen=True, kw_only=True):
    """Tell all workers of the generation which nodes are about to be taken away."""

    generation: int
    preemption: Preemption
    agents: tuple[str, ...] = ()


class FindPins(_Command, frozen=True, kw_only=True):
    """Look which of these checkpoints are pinned; answered by `PinsFound`."""

    names: tuple[str, ...]


class DeleteCheckpoint(_Command, frozen=True, kw_only=True):
    """Remove the checkpoint of this name and token, and no other; answered by `CheckpointRemoved` or
    `CheckpointKept`."""

    name: str
    token: str


class RunValidation(_Command, frozen=True, kw_only=True):
    """Validate a committed checkpoint; answered by `ValidationFinished`."""

    name: str
    token: str
    task: ValidationTask


class FinishCallbacks(_Command, frozen=True, kw_only=True):
    """Wait until the user's callbacks have been called for all that is recorded; answered by `CallbacksFinished`."""

    generation: int


class ChangeBounds(_Command, frozen=True, kw_only=True):
    """The run needs and takes other numbers of workers from now on."""

    workers_min: int
    workers_max: int


class ReleasePlaces(_Command, frozen=True, kw_only=True):
    """Give back the run's places on this agent but the first `keep`; nothing of the run is on those. It has `held`
    there as far as the core knows: if that has changed, all of them are kept, and the core is told anew."""

    agent: str
    keep: int
    held: int


class SetHostAside(_Command, frozen=True, kw_only=True):
    """Drain the agents of this host for a time, if others have room for the whole run."""

    host: str
    why: str
    duration_s: float


class EndRun(_Command, frozen=True, kw_only=True):
    """Shut the agents down and let `fit()` return."""

    status: RunStatus


Command = (
    RequestAgents
    | StartWorkers
    | StopWorkers
    | HoldReports
    | PersistCheckpoint
    | AnnounceCheckpoint
    | AnnounceSettled
    | AnnouncePreemption
    | FindPins
    | DeleteCheckpoint
    | RunValidation
    | FinishCallbacks
    | ChangeBounds
    | ReleasePlaces
    | SetHostAside
    | EndRun
)

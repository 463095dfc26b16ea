"""What must be done: everything that the machine can ask of its shell, in the imperative.

Commands run after the records of the same step are durable. All are idempotent: the shell may be asked twice.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.events import Ticket

__all__ = [
    "Command",
    "DeleteCheckpoint",
    "EndRun",
    "FindPins",
    "PersistCheckpoint",
    "Place",
    "RequestAgents",
    "SettleCheckpoint",
    "StartWorkers",
    "StopWorkers",
]


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's share of a generation."""

    agent: str
    node_rank: int
    ranks: tuple[int, ...]


class RequestAgents(_Command, frozen=True, kw_only=True):
    """Have the engine bring agents with so many more slots in all."""

    slots: int


class StartWorkers(_Command, frozen=True, kw_only=True):
    generation: int
    world_size: int
    places: tuple[Place, ...]
    checkpoint: str | None
    iteration: int
    restart_count: int


class StopWorkers(_Command, frozen=True, kw_only=True):
    """Kill what is left of the generation on these agents; each answers `WorkersStopped`."""

    generation: int
    agents: tuple[str, ...]
    dump_stacks: bool = False


class PersistCheckpoint(_Command, frozen=True, kw_only=True):
    """Reserve, have agents upload the ranks' parts, commit; answered by `CheckpointStored` or `CheckpointFailed`."""

    ticket: Ticket
    parts: tuple[tuple[int, str], ...]
    """(rank, agent) of every rank that gave files."""
    name: str | None
    adopt: bool
    at_least_index: int
    parent: str | None
    world_size: int
    iteration: int
    metrics: dict[str, Any]


class SettleCheckpoint(_Command, frozen=True, kw_only=True):
    """Tell the agents (and so the waiting workers) that the ticket is done with; None: it was given up."""

    ticket: Ticket
    name: str | None
    agents: tuple[str, ...]


class FindPins(_Command, frozen=True, kw_only=True):
    """Look which of these checkpoints are pinned; answered by `PinsFound`."""

    names: tuple[str, ...]


class DeleteCheckpoint(_Command, frozen=True, kw_only=True):
    """Remove the checkpoint of this name and token, and no other; answered by `CheckpointRemoved` or
    `CheckpointKept`."""

    name: str
    token: str


class EndRun(_Command, frozen=True, kw_only=True):
    """Shut the agents down and let `fit()` return. `status` is finished, failed, interrupted or fenced."""

    status: str


Command = (
    RequestAgents
    | StartWorkers
    | StopWorkers
    | PersistCheckpoint
    | SettleCheckpoint
    | FindPins
    | DeleteCheckpoint
    | EndRun
)

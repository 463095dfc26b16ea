"""A machine under test: every step is checked for the invariants and against the fold of its records.

The helpers name the few events that most tests are made of; agents are a, b, ... on hosts host-a, host-b, ...
"""

from __future__ import annotations

from typing import Any

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.checkpoint_types import Report, StoredCheckpoint
from holdfast.core.invariants import Monitor
from holdfast.core.machine import Step, deadline, step
from holdfast.core.spec import RunSpec
from holdfast.core.state import Durable, State, fold

__all__ = [
    "NOTHING",
    "Rig",
    "began",
    "checkpoint_of",
    "committed",
    "died",
    "exited",
    "here",
    "item",
    "joined",
    "persist",
    "report",
    "reported",
    "running",
    "started",
    "stored",
    "two_nodes",
]

NOTHING = Step([], [])


class Rig:
    """Feeds events, remembers every record, and trusts nothing."""

    def __init__(self, spec: RunSpec | None = None, journal: list[r.Record] | None = None, **settings: Any) -> None:
        settings.setdefault("workers_max", settings.setdefault("workers_min", 1))
        self.spec = spec or RunSpec(**settings)
        self.journal: list[r.Record] = list(journal or [])
        self.state = State(self.spec)
        self._shadow = Durable()
        for record in self.journal:
            fold(self.state.durable, record)
            fold(self._shadow, record)
        self._monitor = Monitor(self.state)

    def feed(self, event: e.Event, now: float) -> Step:
        decided = step(self.state, event, now)
        self._monitor.after(decided, now)
        for record in decided.records:
            fold(self._shadow, record)
        self.journal.extend(decided.records)
        self._shadow.next_index = max(self._shadow.next_index, self.state.durable.next_index)
        assert self.state.durable == self._shadow
        return decided

    def stopped(self, generation: int, agent: str, now: float) -> Step:
        """The agent has stopped its workers; whether a host is set aside, if one is to be, is answered at once."""
        decided = self.feed(e.WorkersStopped(generation=generation, agent=agent), now)
        for one in [one for one in decided.commands if isinstance(one, c.SetHostAside)]:
            answered = self.feed(e.SetAsideAnswered(host=one.host), now)
            decided = Step(decided.records + answered.records, decided.commands + answered.commands)
        return decided

    @property
    def deadline(self) -> float | None:
        return deadline(self.state)

    def next_controller(self) -> Rig:
        """The machine of a controller that folds this one's journal."""
        return Rig(self.spec, self.journal)


def began(*found: StoredCheckpoint, epoch: int = 1, **rest: Any) -> e.ControllerBegan:
    return e.ControllerBegan(epoch=epoch, host="head", pid=100 + epoch, stored=tuple(found), **rest)


def started(rig: Rig, at: float, epoch: int = 1) -> r.ControllerStarted:
    return r.ControllerStarted(
        at=at,
        epoch=epoch,
        host="head",
        pid=100 + epoch,
        workers=rig.spec.workers_max,
        num_to_keep=rig.spec.retention.num_to_keep,
    )


def joined(agent: str, slots: int = 1) -> e.AgentJoined:
    return e.AgentJoined(agent=agent, host=f"host-{agent}", slots=slots)


def here(agent: str, at: float, slots: int = 1) -> r.AgentAdded:
    return r.AgentAdded(at=at, agent=agent, host=f"host-{agent}", slots=slots)


def item(number: int, at: float, checkpoint: bool = False, metrics: dict[str, Any] | None = None) -> Report:
    return Report(number=number, at=at, metrics=metrics, checkpoint=checkpoint)


def report(number: int, at: float, checkpoint: bool = False, rank: int = 0, generation: int = 1) -> e.RankReported:
    """Rank 0 reports its number as the loss; the others report no metrics."""
    metrics = {"loss": number} if rank == 0 else None
    return e.RankReported(generation=generation, rank=rank, reports=(item(number, at, checkpoint, metrics),))


def reported(iteration: int, at: float, checkpoint: bool = False, generation: int = 1, loss: int = 0) -> r.Reported:
    metrics = {"loss": loss or iteration}
    return r.Reported(at=at, generation=generation, iteration=iteration, metrics=metrics, checkpoint=checkpoint)


def stored(index: int, iteration: int, generation: int = 1, loss: int = 0) -> StoredCheckpoint:
    return StoredCheckpoint(
        name=f"checkpoint_{index:06d}",
        index=index,
        iteration=iteration,
        generation=generation,
        metrics={"loss": loss or iteration},
        token=f"token-{index}",
    )


def checkpoint_of(number: int, found: StoredCheckpoint) -> e.CheckpointStored:
    return e.CheckpointStored(ticket=e.Ticket(found.generation, number), stored=found)


def committed(found: StoredCheckpoint, at: float) -> r.CheckpointCommitted:
    return r.CheckpointCommitted(
        at=at,
        name=found.name,
        index=found.index,
        iteration=found.iteration,
        generation=found.generation,
        metrics=found.metrics,
        token=found.token,
    )


def persist(number: int, parts: tuple[tuple[int, str], ...], generation: int = 1, **rest: Any) -> c.PersistCheckpoint:
    """What the n-th report of a generation that began at 0 asks for, unless told otherwise."""
    settings: dict[str, Any] = {
        "name": None,
        "adopt": False,
        "at_least_index": 0,
        "world_size": 1,
        "iteration": number,
        "metrics": {"loss": number},
    }
    return c.PersistCheckpoint(ticket=e.Ticket(generation, number), parts=parts, **(settings | rest))


def died(rank: int, cause: str = "was killed by SIGKILL", agent: str = "a", **rest: Any) -> r.WorkerFailure:
    return r.WorkerFailure(rank=rank, cause=cause, agent=agent, host=f"host-{agent}", **rest)


def exited(failure: r.WorkerFailure, generation: int = 1) -> e.WorkerExited:
    return e.WorkerExited(generation=generation, failure=failure)


def running(workers: int = 1, **settings: Any) -> Rig:
    """Generation 1 runs on agent a since time 3; nothing was reported yet."""
    rig = Rig(workers_min=workers, workers_max=workers, **settings)
    rig.feed(began(), 0.0)
    rig.feed(joined("a", workers), 1.0)
    rig.feed(e.AgentPrepared(agent="a"), 2.0)
    rig.feed(e.WorkersStarted(generation=1, agent="a"), 3.0)
    return rig


def two_nodes(**settings: Any) -> Rig:
    """Rank 0 runs on agent a and rank 1 on agent b since time 3."""
    rig = Rig(**({"workers_min": 2, "workers_max": 2} | settings))
    rig.feed(began(), 0.0)
    for agent in ("a", "b"):
        rig.feed(joined(agent), 1.0)
    for agent in ("a", "b"):
        rig.feed(e.AgentPrepared(agent=agent), 2.0)
    for agent in ("a", "b"):
        rig.feed(e.WorkersStarted(generation=1, agent=agent), 3.0)
    return rig

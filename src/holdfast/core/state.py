"""The run's state: what the journal makes durable, and what lives only as long as this controller.

`fold` is the only code that changes the durable part, whether a record was decided a moment ago (`machine.step`) or
read back from storage by a new controller. The volatile part (agents, the generation, pending checkpoints) is rebuilt
from events.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec

from holdfast.core import records as r
from holdfast.core.checkpoint_interval import CheckpointInterval
from holdfast.core.checkpoint_types import Report, RequestedValidation, StoredCheckpoint, Validation, ValidationTask
from holdfast.core.commands import Place
from holdfast.core.events import Ticket
from holdfast.core.failure_kind import FailureKind
from holdfast.core.rank_progress import LowestCount, Silence
from holdfast.core.root_cause import is_echo, root_cause, signature
from holdfast.core.spec import RunSpec

__all__ = [
    "AgentState",
    "CheckpointInMemory",
    "Durable",
    "Generation",
    "Pending",
    "PlannedChange",
    "Question",
    "Removal",
    "State",
    "StopKind",
    "StopReason",
    "fold",
]


@dataclass(slots=True)
class Durable:
    """What survives the controller: the fold of the journal."""

    epoch: int = 0
    generation: int = 0
    iteration: int = 0
    metrics: dict[str, Any] | None = None
    checkpoints: dict[str, StoredCheckpoint] = field(default_factory=dict)
    validations: dict[str, Validation] = field(default_factory=dict)
    """Of the checkpoints that were to be validated, by name."""
    requested_validations: dict[int, RequestedValidation] = field(default_factory=dict)
    """Of checkpoints that are not committed yet, by iteration."""
    next_index: int = 0
    first_index: int = 0
    """Checkpoints with a lower index are from before the last restart: kept, but not resumed from."""
    failures: int = 0
    streak: int = 0
    """How often in a row the run failed the same way without a commit in between."""
    streak_signature: str = ""
    bug: str = ""
    """The last failure's error, line and iteration, where it may be a deterministic bug of the user's code."""
    bug_count: int = 0
    """How often in a row the run failed in just this way without a commit in between."""
    progressed: bool = False
    last_failures: tuple[r.WorkerFailure, ...] = ()
    lost_agent: str = ""
    """Why the last agent that was lost while it prepared was, if the last failure was that."""
    preemptions: int = 0
    """How often the run lost a node that was being drained, and workers with it."""
    last_preemption: r.Preemption | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    asked_workers: tuple[int, int] = (0, 0)
    """The bounds of the number of workers in the script of the last controller."""
    bounds: r.BoundsChanged | None = None
    """Those that were set instead while the run went on."""
    outcome: r.RunFinished | r.RunFailed | r.RunInterrupted | None = None

    def newest(self) -> StoredCheckpoint | None:
        """The newest checkpoint that there is."""
        return max(self.checkpoints.values(), key=_order, default=None)

    def resume_point(self) -> StoredCheckpoint | None:
        """The checkpoint from which the next generation starts; None: from the beginning."""
        return max(self._since_restart(), key=_order, default=None)

    def with_validation(self, stored: StoredCheckpoint) -> StoredCheckpoint:
        """The checkpoint with the metrics that its validation gave."""
        validation = self.validations.get(stored.name)
        if validation is None or validation.token != stored.token or not validation.metrics:
            return stored
        return msgspec.structs.replace(stored, metrics=stored.metrics | validation.metrics)

    def _since_restart(self) -> Iterator[StoredCheckpoint]:
        return (one for one in self.checkpoints.values() if one.index >= self.first_index)


_order = attrgetter("order")


@dataclass(slots=True)
class AgentState:
    """One node's agent, as far as decisions go."""

    name: str
    host: str
    slots: int
    address: str = ""
    master_port: int = 0
    """The port on which it listens for rank 0 of the next generation."""
    snapshot_port: int = 0
    """Where other agents may read what it has in memory of checkpoints; 0: nowhere."""
    prepared: bool = False
    draining: str = ""
    """Why it gets no new workers; "" if it does."""
    draining_since: float = 0.0
    drain_deadline: float | None = None
    """When it will be gone; None: it is not draining, or stays until its workers have moved."""

    @property
    def is_ready(self) -> bool:
        """Whether workers can be started there."""
        return self.prepared and not self.draining


class StopKind(enum.Enum):
    """What kind of reason ends a generation."""

    FAILURE = "failure"
    DAMAGE = "damage"
    """Of the checkpoint to start from."""
    STOP = "stop"
    """The run was asked to stop."""
    DRAIN = "drain"
    """Workers move away from an agent that is draining."""
    RESIZE = "resize"
    """The group is to have another size."""
    FATAL = "fatal"
    """An error that ends the run."""


@dataclass(slots=True)
class StopReason:
    """Why a generation is being stopped."""

    kind: StopKind
    why: str
    detected_at: float


@dataclass(slots=True)
class PlannedChange:
    """A generation is to end at its next checkpoint (`planned_change`)."""

    kind: StopKind
    why: str
    number: int = 0
    """The ranks were asked to stay in reports from this number on; 0: in one that carries a checkpoint."""
    margin: int = 1
    """So many reports beyond the furthest rank the next number will be, if some rank has passed this one."""
    timed_out: bool = False
    """An agent had to be left before there was a checkpoint."""


@dataclass(slots=True)
class Question:
    """A rank asked to be told when every checkpoint up to this report is settled."""

    until_report: int
    until_validated: bool = False
    told_lagging: bool | None = None
    """Whether the rank was told that others lag; None: it was told nothing yet."""


@dataclass(slots=True)
class Generation:
    """One generation of workers, from StartWorkers until the last of them is gone."""

    number: int
    places: tuple[Place, ...]
    base_iteration: int
    checkpoint: str | None
    started_at: float
    alive: set[str] = field(init=False)
    """Agents that may still have workers of this generation."""
    starting: set[str] = field(init=False)
    """Agents that have not sent `WorkersStarted` yet."""
    counts: dict[int, int] = field(init=False)
    """How often each rank has reported; changed by `report`."""
    silence: Silence = field(init=False)
    pids: dict[int, int] = field(default_factory=dict)
    """The process of each rank that has started."""
    recent: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank 0's metrics of reports that some rank has yet to reach."""
    dir_names: dict[int, str] = field(default_factory=dict)
    """Names that rank 0 gave with reports that some rank has yet to reach."""
    worker_states: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """What ranks sent of themselves with reports that some rank has yet to reach, by report and rank."""
    rank_metrics: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """For callbacks: what ranks gave with each report that some rank has yet to reach."""
    finished: set[int] = field(default_factory=set)
    """Changed by `finish`."""
    waiting: set[int] = field(default_factory=set)
    """Changed by `wait`."""
    waiting_in: dict[int, int] = field(default_factory=dict)
    """The ranks that wait in a report for its checkpoint, and its number; changed by `wait_in` and `settle`."""
    questions: dict[int, Question] = field(default_factory=dict)
    """Of each rank that waits for all checkpoints up to a report."""
    new_questions: set[int] = field(default_factory=set)
    """Ranks whose questions were not looked at yet."""
    answered: tuple[int | None, int | None, bool] | None = None
    """What the answers to the other questions were last derived from."""
    failures: list[r.WorkerFailure] = field(default_factory=list)
    """At most one of each rank; changed by `fail`."""
    cause: r.WorkerFailure | None = None
    """The root cause of `failures`."""
    failed: set[int] = field(default_factory=set)
    """The ranks of `failures`."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Checkpoints that agents found damaged before they started workers, and what is wrong with each."""
    running_since: float | None = None
    change: PlannedChange | None = None
    """Why the generation is to end at its next checkpoint, if it is."""
    furthest: int = 0
    """How often the rank has reported that is furthest ahead; changed by `report`."""
    held: dict[int, int] = field(default_factory=dict)
    """The ranks that stay in a report, and its number; changed by `hold` and `release`."""
    lowest_held: int | None = None
    preemption: r.Preemption | None = None
    """Which of its nodes are being drained."""
    preemption_announced: bool = True
    lost_ranks: set[int] = field(default_factory=set)
    """Those of `failed` that were lost with their nodes, or lost a checkpoint with one."""
    stop_reason: StopReason | None = None
    stop_sent: bool = False
    finishing_callbacks: bool = False
    """Every rank has finished, and the callbacks that are behind are waited for."""
    callbacks_finished: bool = False
    return_value: Any = None
    return_value_error: str | None = None
    unreported: int = field(init=False)
    """How many ranks have made no report."""
    _unfinished: LowestCount = field(init=False)
    _going_on: LowestCount = field(init=False)
    """Of ranks that have neither finished nor failed."""
    _agents: dict[int, str] = field(init=False)
    _ranks: dict[str, tuple[int, ...]] = field(init=False)
    _failed_count: int = field(init=False, default=0)
    """How often the failed rank has reported that reported most often."""
    _failed_reported_at: float = field(init=False, default=0.0)
    """When a rank that failed last reported."""
    _raised_only: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self._ranks = {place.agent: place.ranks for place in self.places}
        self._agents = {rank: place.agent for place in self.places for rank in place.ranks}
        self.alive, self.starting = set(self._ranks), set(self._ranks)
        self.counts = dict.fromkeys(self._agents, 0)
        self.unreported = len(self.counts)
        self.silence = Silence(self.counts, self.started_at)
        self._unfinished, self._going_on = LowestCount(len(self.counts)), LowestCount(len(self.counts))

    @property
    def world_size(self) -> int:
        return len(self.counts)

    def agent_of(self, rank: int) -> str:
        return self._agents[rank]

    def ranks_of(self, agent: str) -> tuple[int, ...]:
        return self._ranks.get(agent, ())

    # ------------------------------------------------------------ what ranks do

    def report(self, rank: int, number: int) -> None:
        """The rank has made its `number`-th report, which is more than it had made before."""
        before = self.counts[rank]
        self.counts[rank] = number
        self.furthest = max(self.furthest, number)
        self.unreported -= before == 0
        if rank not in self.finished:
            self._unfinished.move(before, number)
            if rank not in self.failed:
                self._going_on.move(before, number)
        if rank in self.failed:
            self._failed_count = max(self._failed_count, number)

    def saw_report(self, rank: int, now: float) -> None:
        """A report of the rank arrived, whether or not it is a new one."""
        self.silence.report(rank, now)
        if rank in self.failed:
            self._failed_reported_at = now

    def wait(self, rank: int, waiting: bool, now: float) -> None:
        """The rank began or ceased to wait; its peers may have been waiting for it."""
        if waiting:
            self.waiting.add(rank)
            self.silence.ignore(rank)
        elif rank in self.waiting and rank not in self.held and rank not in self.waiting_in:
            self.waiting.remove(rank)
            if rank not in self.finished:
                self.silence.watch(rank, now)
        self.silence.restart(now)

    def wait_in(self, rank: int, number: int, now: float) -> None:
        """The rank waits in this report until its checkpoint is settled. It does not say so when that is over."""
        self.waiting_in[rank] = number
        self.wait(rank, True, now)

    def settle(self, number: int, now: float) -> None:
        """The checkpoint of this report is committed or given up."""
        for rank in [rank for rank, at in self.waiting_in.items() if at <= number]:
            del self.waiting_in[rank]
            self.wait(rank, False, now)

    def hold(self, rank: int, number: int, now: float) -> None:
        """The rank stays in this report until it is told to go on."""
        if self.change is not None and number >= self.change.number:  # otherwise what lets it go on is on its way
            self.held[rank] = number
            self.lowest_held = number if self.lowest_held is None else min(number, self.lowest_held)
            self.wait(rank, True, now)

    def release(self, number: int | None, now: float) -> None:
        """The ranks that stay in reports before this one go on; None: all of them."""
        for rank in [rank for rank, at in self.held.items() if number is None or at < number]:
            del self.held[rank]
            self.wait(rank, False, now)
        self.lowest_held = min(self.held.values(), default=None)

    def finish(self, rank: int) -> None:
        if rank not in self.finished:
            self.finished.add(rank)
            self.silence.ignore(rank)
            self._unfinished.leave(self.counts[rank])
            if rank not in self.failed:
                self._going_on.leave(self.counts[rank])

    def fail(self, failure: r.WorkerFailure) -> None:
        """A rank failed, unless that is known."""
        rank = failure.rank
        if rank in self.failed:
            return
        self.failed.add(rank)
        self.failures.append(failure)
        if self.cause is None or (is_echo(self.cause) and not is_echo(failure)):
            self.cause = failure
        self._failed_count = max(self._failed_count, self.counts[rank])
        self._failed_reported_at = max(self._failed_reported_at, self.silence.since(rank))
        self._raised_only = self._raised_only and failure.error_type is not None
        if rank not in self.finished:
            self._going_on.leave(self.counts[rank])

    # ------------------------------------------------------------ how far they are

    @property
    def behind(self) -> int | None:
        """How often the rank has reported that is furthest behind; None: all have finished."""
        return self._unfinished.lowest

    def has_reached(self, number: int) -> bool:
        """Whether every rank has made its `number`-th report or finished."""
        behind = self._unfinished.lowest
        return behind is None or behind >= number

    @property
    def may_catch_up(self) -> bool:
        """Whether ranks failed by raising only, and another rank has reported less often than one of them."""
        behind = self._going_on.lowest
        return self._raised_only and behind is not None and behind < self._failed_count

    @property
    def failed_reported_at(self) -> float:
        """When a rank that failed last made progress."""
        return max(self._failed_reported_at, self.silence.restarted_at)

    def laggards(self, number: int) -> tuple[int, ...]:
        """Ranks that have neither made their `number`-th report nor finished."""
        if self.has_reached(number):
            return ()
        return tuple(rank for rank, n in self.counts.items() if n < number and rank not in self.finished)


@dataclass(slots=True)
class Pending:
    """A reported checkpoint that is neither committed nor given up."""

    ticket: Ticket
    iteration: int
    since: float
    world_size: int
    parts: dict[int, str] = field(default_factory=dict)
    """The agent of each rank that gave files; changed by `add_part`."""
    ranks: dict[str, list[int]] = field(default_factory=dict)
    """The same by agent."""
    names: dict[int, str] = field(default_factory=dict)
    """The name that each rank asked for, of those that did and gave a part."""
    file_names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """What each rank's files are called."""
    adopted: dict[int, str] = field(default_factory=dict)
    """The directories in the run's storage in which ranks have put their files themselves."""
    name: str | None = None
    """The name that counts, once the checkpoint is complete; None: a numbered one."""
    metrics: dict[str, Any] = field(default_factory=dict)
    worker_states: dict[int, bytes] = field(default_factory=dict)
    """What each rank sent of itself, once the checkpoint is complete."""
    validations: dict[int, ValidationTask | None] = field(default_factory=dict)
    """How each rank that gave a part wants it validated."""
    claims: dict[int, Report] = field(default_factory=dict)
    """The reports that say which ranks' parts are all that it needs, by rank."""
    complete: bool = False
    persisting: bool = False
    warned: bool = False
    lost: str | None = None
    """Why it can never be complete: a part of it is gone. It ends with its generation."""

    def add_part(self, rank: int, agent: str) -> None:
        if rank not in self.parts:
            self.parts[rank] = agent
            self.ranks.setdefault(agent, []).append(rank)

    @property
    def has_all_it_needs(self) -> bool:
        """Whether some rank knows that the parts which are there make the checkpoint whole."""
        return any(
            claim.needed_ranks is not None and self.parts.keys() >= set(claim.needed_ranks)
            for claim in self.claims.values()
        )

    def remove_parts(self, agent: str) -> None:
        """The parts on this agent are lost, and whatever came with them."""
        for rank in self.ranks.pop(agent, ()):
            del self.parts[rank]
            for given in (self.names, self.file_names, self.adopted, self.validations, self.claims):
                given.pop(rank, None)

    @property
    def validation(self) -> ValidationTask | None:
        return self.validations[min(self.validations)] if self.validations else None


@dataclass(slots=True)
class CheckpointInMemory:
    """Which agents may have the checkpoint that was committed last in memory (`neighbours`)."""

    token: str = ""
    agents: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class Removal:
    """A checkpoint that the retention rule removes and that is not removed yet."""

    token: str
    under_way: bool = False
    failures: int = 0
    not_before: float = 0.0
    """When a removal that failed is tried again."""
    invisible: bool = False
    """The manifest is gone; what failed was the deletion of the rest."""


@dataclass(slots=True)
class State:
    """Everything that the machine knows."""

    spec: RunSpec
    durable: Durable = field(default_factory=Durable)
    began: bool = False
    ended: bool = False
    agents: dict[str, AgentState] = field(default_factory=dict)
    """Changed by `add_agent`, `agent_prepared`, `agent_draining` and `remove_agent`."""
    draining_agents: dict[str, None] = field(default_factory=dict)
    slots: int = 0
    """Of all agents."""
    ready_slots: int = 0
    """Of those that are prepared."""
    requested_slots: int = 0
    joined_at: float = 0.0
    """When the last agent joined."""
    agents_wanted_since: float | None = None
    enough_since: float | None = None
    """Since when a run that waits for agents has enough of them to start: this is the last call for more."""
    failed_requests: int = 0
    refusal: str = ""
    """Why the last agent that the run could not use was refused."""
    may_grow_since: float | None = None
    """Since when there has been room for a larger generation than the one that there is."""
    bounds_changed: bool = False
    """The bounds were changed since the generation was formed: who asked for more waits for no settling time."""
    gives_back: bool = False
    """The bounds were lowered: places beyond them are given back as they become free."""
    host_failures: dict[str, list[float]] = field(default_factory=dict)
    """When generations failed lately because of each host."""
    setting_aside: set[str] = field(default_factory=set)
    """Hosts that are to be set aside: what becomes of that is waited for before anything is started there again."""
    generation: Generation | None = None
    pending: dict[Ticket, Pending] = field(default_factory=dict)
    in_memory: CheckpointInMemory = field(default_factory=CheckpointInMemory)
    validating: tuple[str, str] | None = None
    """Name and token of the checkpoint that is being validated."""
    removals: dict[str, Removal] = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    """Pinned checkpoints, as storage had them when they were last looked up."""
    finding_pins: bool = False
    pin_failures: int = 0
    """How often in a row the pins could not be looked up."""
    find_pins_at: float = 0.0
    retention_due: bool = False
    """There is a new checkpoint: the retention rule has to be applied."""
    checkpoint_interval: CheckpointInterval = field(init=False)
    not_before: float = 0.0
    stop: str | None = None
    stop_at: float = 0.0
    """Until when a stop waits for a last checkpoint."""
    forced: bool = False
    """The stop was asked for more than once: nothing is waited for."""
    journal_lost: bool = False
    fatal: tuple[FailureKind, str] | None = None
    """(kind, message) that ends the run as failed."""
    raised: r.RaisedError | None = None
    """What a callback raised, if that is why the run ends."""

    def __post_init__(self) -> None:
        self.checkpoint_interval = CheckpointInterval(self.spec.target_overhead)

    @property
    def workers_min(self) -> int:
        """The smallest world that the run may have."""
        bounds = self.durable.bounds
        return self.spec.workers_min if bounds is None else bounds.workers_min

    @property
    def workers_max(self) -> int:
        """The largest."""
        bounds = self.durable.bounds
        return self.spec.workers_max if bounds is None else bounds.workers_max

    def add_agent(self, agent: AgentState) -> None:
        """An agent joined, or offers another number of slots."""
        self._count(self.agents.get(agent.name), -1)
        self.draining_agents.pop(agent.name, None)
        self.agents[agent.name] = agent
        self._count(agent, 1)

    def agent_prepared(self, name: str, master_port: int, snapshot_port: int = 0) -> None:
        """The agent can start workers; ignored if it is lost."""
        if (agent := self.agents.get(name)) is not None:
            self._count(agent, -1)
            agent.prepared, agent.master_port, agent.snapshot_port = True, master_port, snapshot_port
            self._count(agent, 1)

    def resize_agent(self, name: str, slots: int) -> None:
        """The run keeps only so many places on the agent."""
        self._count(self.agents[name], -1)
        self.agents[name].slots = slots
        self._count(self.agents[name], 1)

    def agents_in_use(self) -> set[str]:
        """Those that may have workers, or hold parts of checkpoints that are not committed."""
        found = {agent for pending in self.pending.values() for agent in pending.ranks}
        return found | {place.agent for place in self.generation.places} if self.generation is not None else found

    def agent_draining(self, name: str, why: str, deadline: float | None, now: float) -> AgentState | None:
        """The agent gets no new workers, and will be gone at the deadline; None if that is known, or it is lost. Of two
        deadlines the earlier one counts."""
        agent = self.agents.get(name)
        if agent is None:
            return None
        is_earlier = deadline is not None and (agent.drain_deadline is None or deadline < agent.drain_deadline)
        if agent.draining and not is_earlier:
            return None
        self._count(agent, -1)
        agent.draining, agent.drain_deadline = why, deadline
        agent.draining_since = now
        self.draining_agents[name] = None
        self._count(agent, 1)
        return agent

    def remove_agent(self, name: str) -> AgentState | None:
        agent = self.agents.pop(name, None)
        self.draining_agents.pop(name, None)
        self.in_memory.agents.pop(name, None)
        self._count(agent, -1)
        return agent

    def _count(self, agent: AgentState | None, sign: int) -> None:
        if agent is not None and not agent.draining:
            self.slots += sign * agent.slots
            self.ready_slots += sign * agent.slots if agent.prepared else 0


def fold(durable: Durable, record: r.Record) -> None:
    """Bring the durable state up to date with one record."""
    match record:
        case r.Reported():
            durable.iteration = record.iteration
            durable.metrics = record.metrics
        case r.ControllerStarted():
            if isinstance(durable.outcome, r.RunFailed | r.RunFinished):
                # Who starts a run again that had ended means to try again.
                durable.failures = durable.streak = durable.bug_count = durable.preemptions = 0
            asked = (record.workers if record.workers_min is None else record.workers_min, record.workers)
            if isinstance(durable.outcome, r.RunFinished) or asked != durable.asked_workers:
                durable.bounds = None
            durable.asked_workers = asked
            durable.epoch = record.epoch
            durable.fingerprint = record.fingerprint
            durable.outcome = None
        case r.RunRestarted():
            durable.iteration, durable.metrics = 0, None
            durable.failures = durable.streak = durable.bug_count = durable.preemptions = 0
            durable.first_index = record.first_index
            durable.bounds = None
        case r.BoundsChanged():
            durable.bounds = record
        case r.GenerationStarted():
            durable.generation = record.generation
            durable.iteration = record.iteration
        case r.CheckpointCommitted():
            durable.checkpoints[record.name] = StoredCheckpoint(
                name=record.name,
                index=record.index,
                iteration=record.iteration,
                generation=record.generation,
                metrics=record.metrics,
                size_bytes=record.size_bytes,
                token=record.token,
            )
            durable.next_index = max(durable.next_index, record.index + 1)
            durable.progressed = True
            _fold_request(durable, record)
        case r.CheckpointDeleted() | r.CheckpointDamaged():
            durable.checkpoints.pop(record.name, None)
            durable.validations.pop(record.name, None)
        case r.ValidationRequested():
            requested = RequestedValidation(generation=record.generation, task=record.task)
            durable.requested_validations[record.iteration] = requested
        case r.CheckpointValidated():
            _fold_validated(durable, record)
        case r.GenerationEnded():
            _fold_end(durable, record)
        case r.RunFinished() | r.RunFailed() | r.RunInterrupted():
            durable.outcome = record
        case r.AgentRemoved():
            if record.counted:
                durable.last_failures, durable.lost_agent = (), record.why
                _count_failure(durable, f"agent: {record.why}")
        case (
            r.AgentAdded()
            | r.AgentRefused()
            | r.ChangePlanned()
            | r.DrainStarted()
            | r.GenerationRunning()
            | r.RanksLagging()
            | r.RanksReported()
        ):
            return  # told for people's sake; nothing is decided by them
        case r.CheckpointAbandoned() | r.RemovalFailed():
            return  # likewise; an abandoned checkpoint may turn out committed, and then is to be validated


def _fold_request(durable: Durable, record: r.CheckpointCommitted) -> None:
    """A commit: if its validation was asked for, that is due now."""
    requested = durable.requested_validations.pop(record.iteration, None)
    if requested is not None and requested.generation == record.generation:
        durable.validations[record.name] = Validation(token=record.token, task=requested.task)
    elif (known := durable.validations.get(record.name)) is not None and known.token != record.token:
        del durable.validations[record.name]  # of another checkpoint that had this name


def _fold_validated(durable: Durable, record: r.CheckpointValidated) -> None:
    known = durable.validations.get(record.name)
    if known is not None and known.token == record.token:
        found = msgspec.structs.replace(known, status=record.status, metrics=record.metrics)
        durable.validations[record.name] = found
        if (stored := durable.checkpoints.get(record.name)) is not None:
            durable.checkpoints[record.name] = durable.with_validation(stored)


def _fold_end(durable: Durable, record: r.GenerationEnded) -> None:
    if record.preemption is not None:
        durable.preemptions += 1
        durable.last_preemption = record.preemption
    if not record.counted:
        return
    durable.last_failures, durable.lost_agent = record.failures, ""
    _count_bug(durable, record)
    _count_failure(durable, signature(root_cause(record.failures)) if record.failures else record.why)


def _count_bug(durable: Durable, record: r.GenerationEnded) -> None:
    if record.bug_at is None:
        durable.bug, durable.bug_count = "", 0
        return
    cause = root_cause(record.failures)
    bug = f"iteration {record.bug_at}: {signature(cause)}: {cause.error}"
    durable.bug_count = durable.bug_count + 1 if bug == durable.bug and not durable.progressed else 1
    durable.bug = bug


def _count_failure(durable: Durable, how: str) -> None:
    durable.failures += 1
    durable.streak = durable.streak + 1 if how == durable.streak_signature and not durable.progressed else 1
    durable.streak_signature = how
    durable.progressed = False

"""Bookkeeping of reports and checkpoints.

A checkpoint is the n-th report of every rank in a generation. It is *complete* once every rank has made its n-th
report (or finished), so the set of its parts is known; it is then persisted, one ticket after the other, whether
or not the workers that reported it still live. Only what is complete survives its generation, or what has all it needs
without the ranks that died before they reported it (`Report.needed_ranks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import neighbours, removal, validation
from holdfast.core import records as r
from holdfast.core.checkpoint_types import Report, StoredCheckpoint
from holdfast.core.failure_kind import FailureKind
from holdfast.core.state import Generation, Pending, State

if TYPE_CHECKING:
    from holdfast.core.machine import Output

__all__ = [
    "answer_questions",
    "complete",
    "complete_without_dead",
    "deadlines",
    "record_damage",
    "drop_incomplete",
    "found_damage",
    "lose_agent",
    "persist_next",
    "record_rank_metrics",
    "reconcile",
    "finish_persisting",
    "add_reports",
    "warn_laggards",
]

_RECENT_LIMIT = 256
"""How many of rank 0's metrics are remembered for ranks that lag behind."""


def reconcile(state: State, event: e.ControllerBegan, now: float, out: Output) -> None:
    """A controller begins: storage, not the journal, says which checkpoints there are."""
    durable = state.durable
    is_new = durable.epoch == 0
    out.record(
        r.ControllerStarted(
            at=now,
            epoch=event.epoch,
            host=event.host,
            pid=event.pid,
            workers=state.spec.workers_max,
            workers_min=None if state.spec.workers_min == state.spec.workers_max else state.spec.workers_min,
            score_attribute=state.spec.retention.score_attribute,
            score_order=state.spec.retention.score_order,
            num_to_keep=state.spec.retention.num_to_keep,
            fingerprint=event.fingerprint,
            changes=event.changes,
        )
    )
    known = {stored.name for stored in event.stored}
    for name, why in event.damaged:
        out.record(r.CheckpointDamaged(at=now, name=name, why=why))
    for stored in event.stored:
        before = durable.checkpoints.get(stored.name)
        if before is None or (before.token and before.token != stored.token):
            out.record(_committed(stored, now))
        durable.checkpoints[stored.name] = durable.with_validation(stored)
    # Retention removes first and writes that down afterwards; what it would have removed is not missed.
    expired = removal.to_remove(state, pins=set())
    for name in [name for name in durable.checkpoints if name not in known]:
        if name in expired:
            removal.finish_removal(state, name)
            out.record(r.CheckpointDeleted(at=now, name=name))
        else:
            out.record(r.CheckpointDamaged(at=now, name=name, why="it is gone from storage"))
    durable.next_index = max(durable.next_index, event.next_index)
    if event.restart and not is_new:
        out.record(r.RunRestarted(at=now, first_index=durable.next_index))
    state.pins = set(event.pinned)
    removal.remove_now(state, now, out)


def add_reports(state: State, generation: Generation, event: e.RankReported, now: float, out: Output) -> None:
    """One rank's reports, in order. A report seen before is ignored."""
    rank = event.rank
    if event.reports:
        generation.saw_report(rank, now)
    for item in event.reports:
        if item.number <= generation.counts[rank]:
            continue
        generation.report(rank, item.number)
        if item.held:
            generation.hold(rank, item.number, now)
        if item.waits:
            generation.wait_in(rank, item.number, now)
        iteration = generation.base_iteration + item.number
        if state.spec.has_callbacks and generation.world_size > 1:
            generation.rank_metrics.setdefault(item.number, {})[rank] = item.metrics or {}
        if rank == 0:
            metrics = item.metrics or {}
            out.record(
                r.Reported(
                    at=item.at,
                    generation=generation.number,
                    iteration=iteration,
                    metrics=metrics,
                    checkpoint=item.checkpoint,
                    stall_s=item.stall_s,
                )
            )
            if generation.world_size > 1:
                generation.recent[item.number] = metrics
                if len(generation.recent) > _RECENT_LIMIT:
                    generation.recent.pop(next(iter(generation.recent)))
                if item.checkpoint_dir_name is not None:
                    generation.dir_names[item.number] = item.checkpoint_dir_name
        if item.worker_state:
            _keep_worker_state(state, generation, rank, item)
        if item.checkpoint:
            if rank == 0:
                state.checkpoint_interval.stalled(item.stall_s, now)
            _add_part(state, generation, rank, item, iteration, now)


def _keep_worker_state(state: State, generation: Generation, rank: int, item: Report) -> None:
    """Until every rank has made this report: it may turn out to be a checkpoint's. Of ranks that run far ahead only the
    last states are kept, and those of checkpoints."""
    kept = generation.worker_states
    kept.setdefault(item.number, {})[rank] = item.worker_state
    if len(kept) > _RECENT_LIMIT:
        oldest = (number for number in kept if e.Ticket(generation.number, number) not in state.pending)
        del kept[next(oldest)]


def _add_part(state: State, generation: Generation, rank: int, item: Report, iteration: int, now: float) -> None:
    ticket = e.Ticket(generation.number, item.number)
    pending = state.pending.get(ticket)
    if pending is None:
        pending = state.pending[ticket] = Pending(ticket, iteration, now, generation.world_size)
    pending.add_part(rank, generation.agent_of(rank))
    pending.validations[rank] = item.validation
    if item.needed_ranks is not None:
        pending.claims[rank] = item
    if item.file_names:
        pending.file_names[rank] = item.file_names
    if rank == 0:
        pending.metrics = item.metrics or {}
    if item.checkpoint_dir_name is not None:
        (pending.adopted if item.adopt else pending.names)[rank] = item.checkpoint_dir_name


def complete(state: State, generation: Generation) -> None:
    """Mark the tickets that every rank has reached."""
    for ticket, pending in state.pending.items():
        reachable = not pending.complete and pending.lost is None and ticket.generation == generation.number
        if reachable and generation.has_reached(ticket.number):
            _complete(state, generation, pending)
    if generation.recent or generation.dir_names or generation.worker_states:
        behind = generation.behind or 0
        for remembered in (generation.recent, generation.dir_names, generation.worker_states):
            while remembered and (number := next(iter(remembered))) <= behind:
                del remembered[number]


def _complete(state: State, generation: Generation, pending: Pending) -> None:
    pending.complete = True
    pending.name = _name(generation, pending)
    pending.worker_states = generation.worker_states.get(pending.ticket.number, {})
    pending.metrics = pending.metrics or generation.recent.get(pending.ticket.number) or state.durable.metrics or {}


def complete_without_dead(state: State, generation: Generation, now: float, out: Output) -> None:
    """The generation has ended: complete the checkpoints that have all they need without the ranks that died.

    Where rank 0 is one of those, its report of that step is missing: the lowest rank that knows the checkpoint to be
    whole stands in for it, so that the reports that count have no gap. Where rank 0 lags further behind, the reports in
    between are unknown, and the checkpoint is given up."""
    for ticket in sorted(state.pending):
        pending = state.pending[ticket]
        if pending.complete or ticket.generation != generation.number or not pending.has_all_it_needs:
            continue
        if 0 not in generation.finished and generation.counts[0] < ticket.number:
            if generation.counts[0] < ticket.number - 1:
                continue
            claim = pending.claims[min(pending.claims)]
            pending.metrics = claim.metrics or {}
            generation.report(0, ticket.number)
            out.record(
                r.Reported(
                    at=claim.at,
                    generation=generation.number,
                    iteration=pending.iteration,
                    metrics=pending.metrics,
                    checkpoint=True,
                    stall_s=claim.stall_s,
                )
            )
        pending.lost = None
        _complete(state, generation, pending)


def record_rank_metrics(state: State, generation: Generation, now: float, out: Output) -> None:
    """For callbacks: record what all ranks reported, in order, for each report of rank 0 that every rank has made (or
    will not make). Ranks that lag too far behind count as having reported nothing."""
    if not generation.rank_metrics:
        return
    behind = generation.behind
    first = generation.counts[0]
    for number in sorted(generation.rank_metrics):
        is_reached = behind is None or number <= behind
        if not is_reached and len(generation.rank_metrics) <= _RECENT_LIMIT:
            return
        if number > first and 0 not in generation.finished:
            return
        given = generation.rank_metrics.pop(number)
        if number <= first:
            out.record(
                r.RanksReported(
                    at=now,
                    generation=generation.number,
                    iteration=generation.base_iteration + number,
                    metrics=tuple(given.get(rank, {}) for rank in range(generation.world_size)),
                    checkpoint=e.Ticket(generation.number, number) in state.pending,
                )
            )


def _name(generation: Generation, pending: Pending) -> str | None:
    """Where the files lie already; otherwise the name that rank 0 gave, with a part or without one; otherwise that of
    the lowest rank that gave one."""
    if pending.adopted:
        return pending.adopted[min(pending.adopted)]
    if (first := generation.dir_names.get(pending.ticket.number)) is not None:
        return first
    return pending.names[min(pending.names)] if pending.names else None


def persist_next(state: State, now: float, out: Output) -> None:
    """Persist the oldest complete ticket, unless one is being persisted already.

    Without a journal nothing new may begin. What is under way is left to its own outcome, which the end of the run
    waits for: the next controller finds its manifest."""
    if state.journal_lost:
        for pending in [pending for pending in state.pending.values() if not pending.persisting]:
            state.pending.pop(pending.ticket)
            _give_up(state, pending, "the journal could not be written", now, out)
    if not state.pending:
        return
    ticket = min(state.pending)
    pending = state.pending[ticket]
    if pending.persisting or not pending.complete or removal.holds_name(state, pending.name):
        return
    pending.persisting = True
    validation.record_request(state, pending, now, out)
    out.do(
        c.PersistCheckpoint(
            ticket=ticket,
            parts=tuple(sorted(pending.parts.items())),
            file_names=pending.file_names,
            name=pending.name,
            adopt=bool(pending.adopted),
            at_least_index=state.durable.next_index,
            world_size=pending.world_size,
            iteration=pending.iteration,
            metrics=pending.metrics,
            worker_states=pending.worker_states,
        )
    )


def finish_persisting(
    state: State, event: e.CheckpointStored | e.CheckpointFailed, now: float, out: Output
) -> dict[int, str]:
    """The checkpoint of a ticket is stored, or has failed. Gives the ranks, with their agents, whose parts were lost
    with those."""
    pending = state.pending.pop(event.ticket, None)
    if pending is None:
        return {}
    if state.generation is not None:
        state.generation.silence.restart(now)  # workers may have been waiting for this
    if isinstance(event, e.CheckpointStored):
        state.checkpoint_interval.stored(event.elapsed_s)
        out.record(_committed(event.stored, now, event.uploaded_bytes, event.elapsed_s))
        neighbours.committed(state, event.stored, pending.parts.values())
        _announce(state, pending, event.stored, now, out)
        state.retention_due = True
        return {}
    lost = {rank: agent for rank, agent in pending.parts.items() if agent not in state.agents}
    if lost and not event.fatal:
        for agent in set(lost.values()):
            pending.remove_parts(agent)
        if pending.has_all_it_needs:
            pending.persisting = False
            state.pending[event.ticket] = pending  # tried again, without the parts that are gone
            return {}
    _give_up(state, pending, event.error, now, out)
    if event.fatal:
        state.fatal = state.fatal or (event.kind, event.error)
    return lost


def drop_incomplete(state: State, now: float, out: Output) -> None:
    """The generation has ended: give up the checkpoints that are not complete."""
    for pending in [pending for pending in state.pending.values() if not pending.complete]:
        state.pending.pop(pending.ticket)
        why = pending.lost or "the workers stopped before every rank had reported it"
        _give_up(state, pending, why, now, out)


def lose_agent(state: State, agent: str, now: float, out: Output) -> set[int]:
    """Parts staged on a lost agent are lost with it; says whose, unless the checkpoint has all it needs without them.
    What is being persisted is left to its own outcome, and what is not complete to the end of its generation: another
    rank's part may still come, and must not make it whole.
    """
    bereft: set[int] = set()
    for pending in list(state.pending.values()):
        ranks = pending.ranks.get(agent)
        if not ranks or pending.persisting:
            continue
        pending.remove_parts(agent)
        if pending.has_all_it_needs:
            continue
        bereft.update(ranks)
        why = f"agent {agent} was lost with its part"
        if pending.complete:
            state.pending.pop(pending.ticket)
            _give_up(state, pending, why, now, out)
        else:
            pending.lost = why
    return bereft


def found_damage(state: State, generation: Generation) -> dict[str, str]:
    """The checkpoints of the run that could not be loaded since their bytes are not what was committed, and why.

    One that the run does not have (any more) is not among them, so each costs the run one of its checkpoints and the
    number of generations that end like this is bounded.
    """
    found = dict(generation.damaged)
    for failure in generation.failures:
        if failure.kind is FailureKind.DAMAGED and failure.damaged_checkpoint is not None:
            found.setdefault(failure.damaged_checkpoint, failure.error or "")
    return {name: why for name, why in found.items() if name in state.durable.checkpoints}


def record_damage(state: State, generation: Generation, now: float, out: Output) -> None:
    """A checkpoint that was found damaged is not used again: the one before it is next."""
    for name, why in found_damage(state, generation).items():
        out.record(r.CheckpointDamaged(at=now, name=name, why=why))


def answer_questions(state: State, generation: Generation, out: Output) -> None:
    """Tell ranks that wait for all checkpoints up to a report how these stand, where that has changed."""
    if not generation.questions:
        return
    behind = generation.behind
    oldest = min((ticket.number for ticket in state.pending), default=None)
    are_due = validation.are_due(state)
    if generation.answered != (behind, oldest, are_due):
        generation.answered = behind, oldest, are_due
        asking = list(generation.questions)
    else:
        asking = list(generation.new_questions)
    generation.new_questions.clear()
    for rank in asking:
        question = generation.questions[rank]
        until = question.until_report
        is_lagging = behind is not None and behind < until
        is_settled = not is_lagging and (oldest is None or oldest > until)
        is_settled = is_settled and not (question.until_validated and are_due)
        if question.told_lagging is is_lagging and not is_settled:
            continue
        question.told_lagging = is_lagging
        if is_settled:
            del generation.questions[rank]
        out.do(
            c.AnnounceSettled(
                generation=generation.number,
                rank=rank,
                until_report=until,
                lagging=generation.laggards(until) if is_lagging else (),
                settled=is_settled,
                validations=dict(state.durable.validations),
                agents=(generation.agent_of(rank),),
            )
        )


def warn_laggards(state: State, generation: Generation, now: float, out: Output) -> None:
    for pending in state.pending.values():
        if _may_lag(pending) and now >= pending.since + state.spec.lag_warning_s:
            pending.warned = True
            ranks = generation.laggards(pending.ticket.number)
            number = pending.ticket.number
            out.record(r.RanksLagging(at=now, generation=generation.number, number=number, ranks=ranks))


def deadlines(state: State) -> list[float]:
    return [
        pending.since + state.spec.lag_warning_s
        for pending in state.pending.values()
        if _may_lag(pending) and state.generation is not None
    ]


def _may_lag(pending: Pending) -> bool:
    return not pending.complete and not pending.warned and pending.lost is None


def _give_up(state: State, pending: Pending, why: str, now: float, out: Output) -> None:
    ticket, iteration = pending.ticket, pending.iteration
    out.record(r.CheckpointAbandoned(at=now, generation=ticket.generation, iteration=iteration, why=why))
    _announce(state, pending, None, now, out)


def _announce(state: State, pending: Pending, stored: StoredCheckpoint | None, now: float, out: Output) -> None:
    """To the agents that hold its parts; a commit to the whole generation, since any rank may ask for the newest."""
    concerned = set(pending.parts.values())
    generation = state.generation
    if generation is not None and generation.number == pending.ticket.generation:
        generation.settle(pending.ticket.number, now)
        if stored is not None:
            concerned.update(place.agent for place in generation.places)
    agents = tuple(sorted(concerned & state.agents.keys()))
    if agents:
        name, token = (None, "") if stored is None else (stored.name, stored.token)
        out.do(c.AnnounceCheckpoint(ticket=pending.ticket, name=name, token=token, agents=agents))


def _committed(
    stored: StoredCheckpoint, now: float, uploaded_bytes: int = 0, elapsed_s: float = 0.0
) -> r.CheckpointCommitted:
    return r.CheckpointCommitted(
        at=now,
        name=stored.name,
        index=stored.index,
        iteration=stored.iteration,
        generation=stored.generation,
        metrics=stored.metrics,
        size_bytes=stored.size_bytes,
        uploaded_bytes=uploaded_bytes,
        elapsed_s=elapsed_s,
        token=stored.token,
    )

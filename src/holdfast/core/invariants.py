"""What must hold after every step of the run's machine, whatever happened.

`check` looks at one state; `Monitor` also remembers the state before, and so sees what may only grow. Tests and the
simulator call them after each `machine.step`; each broken rule is an AssertionError with a sentence. `machine`,
`pending_checkpoints` and `placement` are the code under watch and share nothing with this module but the state.
"""

from __future__ import annotations

from holdfast.core import commands as c
from holdfast.core import machine, planned_change, removal
from holdfast.core import records as r
from holdfast.core.events import Ticket
from holdfast.core.root_cause import root_cause
from holdfast.core.state import Generation, State, StopKind

__all__ = ["Monitor", "check"]


def check(state: State) -> None:
    """Raise AssertionError with a sentence if this state should be impossible."""
    _check_durable(state)
    _check_pending(state)
    if state.generation is not None:
        _check_generation(state, state.generation)
    if state.began and not state.ended:
        _check_moves(state)
    _check_counters(state)


def _check_durable(state: State) -> None:
    durable, budget = state.durable, state.spec.max_failures
    if budget >= 0:
        _require(durable.failures <= budget + 1, f"{durable.failures} failures were counted with a budget of {budget}")
    _require(durable.streak <= durable.failures, f"a streak of {durable.streak} out of {durable.failures} failures")
    for stored in durable.checkpoints.values():
        _require(stored.index < durable.next_index, f"{stored.name} is not below the next index {durable.next_index}")


def _check_pending(state: State) -> None:
    persisting = [ticket for ticket, pending in state.pending.items() if pending.persisting]
    _require(len(persisting) <= 1, f"{persisting} are persisted at once")
    for ticket, pending in state.pending.items():
        _require(ticket == pending.ticket, f"{pending.ticket} is kept as {ticket}")
        _require(bool(pending.parts) or pending.lost is not None, f"{ticket} has no parts")
        _require(max(pending.parts, default=0) < pending.world_size, f"{ticket} has a part of a rank that there is not")
        _require(pending.complete or not pending.persisting, f"{ticket} is persisted before it is complete")
        _require(not (pending.complete and pending.lost), f"{ticket} is complete although a part of it is lost")
        of_current = state.generation is not None and state.generation.number == ticket.generation
        _require(of_current or pending.complete, f"{ticket} waits for ranks of a generation that is gone")
        _require(of_current or state.generation is None, f"a generation was formed while {ticket} was pending")
    if persisting:
        _require(persisting[0] == min(state.pending), f"{persisting[0]} is persisted before {min(state.pending)}")


def _check_generation(state: State, generation: Generation) -> None:
    ranks = [rank for place in generation.places for rank in place.ranks]
    agents = [place.agent for place in generation.places]
    _require(ranks == list(range(generation.world_size)), f"ranks {ranks} are not each placed once")
    _require(len(set(agents)) == len(agents), f"an agent has two places: {agents}")
    _require(
        generation.alive <= set(agents) and generation.starting <= set(agents), "an agent without a place has workers"
    )
    _require(generation.finished | generation.waiting <= set(ranks), "a rank that there is not finished or waits")
    _require(generation.waiting_in.keys() <= generation.waiting, "a rank that waits in a report does not wait")
    awaited = {Ticket(generation.number, number) for number in generation.waiting_in.values()}
    _require(awaited <= state.pending.keys() or state.ended, "a rank waits for a checkpoint that is settled")
    failed = [failure.rank for failure in generation.failures]
    _require(len(set(failed)) == len(failed) and set(failed) <= set(ranks), f"ranks {failed} failed")
    _require(not failed or generation.stop_reason is not None, f"ranks {failed} failed and the generation goes on")
    _require(generation.number == state.durable.generation, f"generation {generation.number} is not the newest")
    if generation.stop_reason is not None:
        _require(generation.stop_reason.kind is not StopKind.FAILURE or bool(failed), "a failure is nobody's")
        told = state.ended or generation.stop_sent or machine.catch_up_deadline(state, generation) is not None
        _require(told, "a generation that ends was not told to stop")
        _require(bool(generation.alive) or state.ended, "a generation of which nothing is alive is still there")
    loading = generation.checkpoint is not None and min(generation.counts.values()) == 0
    _require(
        not loading or generation.checkpoint in state.durable.checkpoints,
        f"{generation.checkpoint} was let go while workers may load it",
    )


def _check_moves(state: State) -> None:
    """A run that goes on waits for something: workers, an outcome, agents or a deadline."""
    generation = state.generation
    asked = removal.is_under_way(state) or state.setting_aside
    if generation is None and not state.pending and not asked:
        _require(machine.deadline(state) is not None, "the run waits for nothing and will never go on")
    if generation is not None and generation.stop_reason is None and not state.pending and not asked:
        done = len(generation.finished) == generation.world_size
        done = done and not generation.finishing_callbacks and state.validating is None
        _require(not done, "every rank has finished and the run goes on")
    first = min(state.pending.values(), key=lambda pending: pending.ticket, default=None)
    if first is not None and first.complete and not removal.holds_name(state, first.name):
        _require(any(pending.persisting for pending in state.pending.values()), "no complete checkpoint is persisted")
    if (state.stop is not None or state.fatal is not None) and generation is not None:
        waits = state.stop_at > 0 and state.stop_at in planned_change.deadlines(state, generation)
        _require(waits or generation.stop_reason is not None, "a run that must end keeps its workers")


def _check_counters(state: State) -> None:
    """What is counted while events arrive is what a scan over all agents and ranks finds."""
    agents = state.agents.values()
    slots = sum(agent.slots for agent in agents if not agent.draining)
    _require(state.slots == slots, f"{state.slots} slots were counted, not {slots}")
    ready = sum(agent.slots for agent in agents if agent.is_ready)
    _require(state.ready_slots == ready, f"{state.ready_slots} ready slots were counted, not {ready}")
    for ticket, pending in state.pending.items():
        parts = {rank: agent for agent, ranks in pending.ranks.items() for rank in ranks}
        _require(parts == pending.parts, f"the parts of {ticket} by agent are {pending.ranks}")
    if state.generation is not None:
        _check_rank_counters(state.generation)


def _check_rank_counters(generation: Generation) -> None:
    counts = generation.counts
    unfinished = {rank: count for rank, count in counts.items() if rank not in generation.finished}
    behind = min(unfinished.values(), default=None)
    _require(generation.behind == behind, f"{generation.behind} reports were counted, not {behind}")
    unreported = sum(count == 0 for count in counts.values())
    _require(generation.unreported == unreported, f"{generation.unreported} ranks without a report were counted")
    _require(generation.failed == {one.rank for one in generation.failures}, f"ranks {generation.failed} failed")
    for place in generation.places:
        agents = {generation.agent_of(rank) for rank in generation.ranks_of(place.agent)}
        _require(generation.ranks_of(place.agent) == place.ranks and agents == {place.agent}, f"{place} was not found")
    if generation.failures:
        _require(generation.cause is root_cause(generation.failures), f"{generation.cause} is not the root cause")
        going_on = [count for rank, count in unfinished.items() if rank not in generation.failed]
        raised = all(failure.error_type is not None for failure in generation.failures)
        may_catch_up = raised and min(going_on, default=0) < max(counts[rank] for rank in generation.failed)
        _require(generation.may_catch_up == (may_catch_up and bool(going_on)), "ranks that lag were miscounted")
        reported_at = max(map(generation.silence.since, generation.failed))
        _require(generation.failed_reported_at == reported_at, "the last report of a rank that failed was missed")
    watched = {rank: generation.silence.since(rank) for rank in unfinished if rank not in generation.waiting}
    watched = {rank: since for rank, since in watched.items() if counts[rank] > 0} or watched
    longest_since = min(watched.values(), default=None)
    longest = {rank for rank, since in watched.items() if since == longest_since}
    _require(
        (generation.silence.longest_since, set(generation.silence.longest)) == (longest_since, longest),
        f"ranks {longest} have been silent since {longest_since}, and others were watched",
    )


class Monitor:
    """Watches one machine: call `after` with every step it made."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._remember()

    def after(self, step: machine.Step, now: float) -> None:
        """Check the state, and that what may only grow has only grown since the last call."""
        self._check_growth()
        check(self._state)
        self._check_records(step)
        self._check_commands(step)
        due = machine.deadline(self._state)
        _require(due is None or due > now, f"a deadline of {due} is set at {now}, when it has passed")
        self._remember()

    def _remember(self) -> None:
        state = self._state
        self._ended = state.ended
        self._generation = state.durable.generation
        self._index = state.durable.next_index
        self._counts = dict(state.generation.counts) if state.generation is not None else {}
        self._running = state.generation.number if state.generation is not None else None
        self._persisting = {ticket: len(one.parts) for ticket, one in state.pending.items() if one.persisting}

    def _check_growth(self) -> None:
        state = self._state
        _require(state.durable.generation >= self._generation, "the generation went back")
        _require(state.durable.next_index >= self._index, "the next index went back")
        if state.generation is not None and state.generation.number == self._running:
            shrunk = [rank for rank, count in self._counts.items() if state.generation.counts[rank] < count]
            _require(not shrunk, f"the reports of ranks {shrunk} became fewer")

    def _check_records(self, step: machine.Step) -> None:
        if self._ended:
            _require(not step.records and not step.commands, "a run that has ended did something")
        generation = self._generation
        for record in step.records:
            if isinstance(record, r.GenerationStarted):
                _require(record.generation > generation, f"generation {record.generation} came after {generation}")
                generation = record.generation
            elif isinstance(record, r.Reported):
                _require(record.generation == generation, f"a report of generation {record.generation} counted")
            elif isinstance(record, r.CheckpointDeleted):
                newest = self._state.durable.newest()
                _require(newest is not None and newest.name != record.name, f"the newest, {record.name}, was let go")

    def _check_commands(self, step: machine.Step) -> None:
        started = [command for command in step.commands if isinstance(command, c.StartWorkers)]
        persisted = [command for command in step.commands if isinstance(command, c.PersistCheckpoint)]
        ends = [command for command in step.commands if isinstance(command, c.EndRun)]
        _require(len(started) <= 1 and len(persisted) <= 1 and len(ends) <= 1, "a step did the same thing twice")
        _require(bool(ends) == (self._state.ended and not self._ended), "the run ended without a word, or twice")
        budget = self._state.spec.max_failures
        if started:
            _require(budget < 0 or self._state.durable.failures <= budget, "workers were started beyond the budget")
            _require(started[0].generation == self._state.durable.generation, "workers of an old generation started")
            fewest, most, size = self._state.workers_min, self._state.workers_max, started[0].world_size
            _require(fewest <= size <= most, f"a world of {size} is outside {fewest} to {most}")
        for command in step.commands:
            if isinstance(command, c.DeleteCheckpoint):
                newest = self._state.durable.newest()
                _require(newest is not None and newest.name != command.name, f"the newest, {command.name}, must go")
                _require(command.name not in self._state.pins, f"{command.name} is pinned and must go")
        # A part that was lost on the way may be done without; what was tried with it is tried again without it.
        again = [command.ticket for command in persisted if self._persisting.get(command.ticket) == len(command.parts)]
        _require(not again, f"{again} were persisted twice")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(f"{sentence}.")

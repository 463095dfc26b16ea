"""The run's state machine: `step(state, event, now)` applies an event and returns the records and commands that follow.

It reads no clock and does no I/O. It is level-triggered: an event only updates what is known (`_apply`), and
`_advance` then looks at the whole state and makes every move that has become possible, so that the order in which
news arrives decides nothing. Every change of membership is the same move: stop the generation, wait until nothing
of it is alive and every complete checkpoint is committed or given up, start the next generation from the newest commit.
Checkpoint bookkeeping is in `holdfast.core.pending_checkpoints`, forming generations in `holdfast.core.placement`.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core import (
    bounds,
    neighbours,
    pending_checkpoints,
    placement,
    planned_change,
    preemption,
    quarantine,
    removal,
    validation,
)
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.failure_kind import FailureKind
from holdfast.core.root_cause import may_be_deterministic, root_cause
from holdfast.core.state import AgentState, Generation, Question, State, StopKind, StopReason, fold

__all__ = ["Output", "Step", "catch_up_deadline", "deadline", "step"]


class Step(NamedTuple):
    """What one event led to. The records must be durable before the commands run."""

    records: list[r.Record]
    commands: list[c.Command]


class Output:
    """Collects a step's records and commands; a record takes effect on the state as it is made."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.records: list[r.Record] = []
        self.commands: list[c.Command] = []

    def record(self, record: r.Record) -> None:
        fold(self._state.durable, record)
        self.records.append(record)

    def do(self, command: c.Command) -> None:
        self.commands.append(command)


def step(state: State, event: e.Event, now: float) -> Step:
    """Take one event in and decide. `state` is changed in place."""
    out = Output(state)
    if not state.ended:
        _apply(state, event, now, out)
        if state.began and not state.ended:
            _advance(state, now, out)
    return Step(out.records, out.commands)


def deadline(state: State) -> float | None:
    """When `TimePassed` should be fed if nothing else happens first."""
    if state.ended or not state.began:
        return None
    times = pending_checkpoints.deadlines(state) + removal.deadlines(state)
    generation = state.generation
    if generation is not None and not generation.stop_sent:
        until = catch_up_deadline(state, generation)
        times.extend([until] if until is not None else [])
    if generation is None:
        if not _waits_for_removal(state) and not state.setting_aside:
            times.extend(placement.deadlines(state))
    else:
        times.extend(planned_change.deadlines(state, generation))
        if generation.stop_reason is None and (hang_at := _hang_deadline(state, generation)) is not None:
            times.append(hang_at)
    return min(times, default=None)


def _apply(state: State, event: e.Event, now: float, out: Output) -> None:
    match event:
        case e.RankReported():
            if (generation := _current(state, event.generation)) is not None:
                pending_checkpoints.add_reports(state, generation, event, now, out)
        case e.ControllerBegan():
            if isinstance(state.durable.outcome, r.RunFinished) and not event.changes and not event.restart:
                _end(state, c.RunStatus.FINISHED, out)  # complete already: nothing to add, not even a record
                return
            pending_checkpoints.reconcile(state, event, now, out)
            bounds.restore(state, now, out)
            state.began = True
        case e.AgentJoined():
            state.add_agent(AgentState(event.agent, event.host, event.slots, event.address))
            state.joined_at = now
            state.requested_slots = max(0, state.requested_slots - event.slots)
            state.failed_requests = 0
            spare = event.agent in placement.spare_agents(state)
            out.record(r.AgentAdded(at=now, agent=event.agent, host=event.host, slots=event.slots, spare=spare))
        case e.AgentPrepared():
            state.agent_prepared(event.agent, event.master_port, event.snapshot_port)
        case e.AgentRefused():
            state.refusal = event.why
            out.record(r.AgentRefused(at=now, agent=event.agent, why=event.why))
        case e.AgentLost():
            _lose_agent(state, event, now, out)
        case e.AgentDraining():
            deadline = None if event.deadline_s is None else now + event.deadline_s
            if (agent := state.agent_draining(event.agent, event.why, deadline, now)) is not None:
                started = r.DrainStarted(at=now, agent=agent.name, host=agent.host, why=event.why, deadline=deadline)
                out.record(started)
                preemption.add_drain(state.generation, agent)
        case e.AgentUnavailable():
            placement.agent_unavailable(state, event, now)
        case e.PlacesTaken():
            if state.agents_wanted_since is not None:
                state.agents_wanted_since = now  # its turn comes, however long the others take
        case e.CheckpointStored() | e.CheckpointFailed():
            lost = pending_checkpoints.finish_persisting(state, event, now, out)
            if (generation := _current(state, event.ticket.generation)) is not None:
                for rank, holder in lost.items():
                    if rank not in generation.failed:
                        generation.lost_ranks.add(rank)
                    cause = "lost a checkpoint that it had reported with its node"
                    _add_failure(generation, r.WorkerFailure(rank=rank, cause=cause, agent=holder), now)
        case e.PinsFound():
            removal.pins_found(state, event, now, out)
        case e.CheckpointRemoved():
            removal.checkpoint_removed(state, event, now, out)
        case e.CheckpointKept():
            removal.checkpoint_kept(state, event, now, out)
        case e.ValidationFinished():
            validation.finish_validation(state, event, now, out)
        case e.CallbackFailed(raised=raised):
            if state.fatal is None:
                why = f"the callback {raised.where} raised {raised.error_type}: {raised.error}"
                state.fatal, state.raised = (FailureKind.OTHER, why), raised
        case e.CallbacksFinished():
            if (generation := _current(state, event.generation)) is not None:
                generation.callbacks_finished = True
        case e.StorageLost():
            state.fatal = (event.kind, event.error)
            state.journal_lost = True
            removal.forget(state)
        case e.ControllerFenced():
            state.ended = True
            state.fatal = (FailureKind.FENCED, event.why)
            out.do(c.EndRun(status=c.RunStatus.FENCED))
        case e.ControllerStalled():
            if state.generation is not None:
                state.generation.silence.restart(now)
            if state.agents_wanted_since is not None:
                state.agents_wanted_since += event.stalled_s
            if state.enough_since is not None:
                state.enough_since += event.stalled_s
        case e.StopRequested():
            if state.stop is None:
                state.stop = event.why
                if state.generation is not None and state.generation.running_since is not None:
                    state.stop_at = now + state.checkpoint_interval.next_within_s(event.grace_s, now)
            if event.force:
                state.forced = True
                state.pending.clear()
                state.generation = None
        case e.BoundsRequested():
            bounds.change(state, event, now, out)
        case e.SetAsideAnswered():
            state.setting_aside.discard(event.host)
        case e.TimePassed():
            return
        case _:
            _apply_worker_event(state, event, now)


def _apply_worker_event(state: State, event: e.Event, now: float) -> None:
    match event:
        case e.WorkersStarted():
            if (generation := _current(state, event.generation)) is not None:
                generation.starting.discard(event.agent)
                generation.pids.update(event.pids)
                neighbours.started(state, generation, event.agent)
                generation.silence.restart(now)
        case e.DamageFound():
            if (generation := _current(state, event.generation)) is not None:
                generation.damaged.setdefault(event.checkpoint, event.why)
                if generation.stop_reason is None:
                    generation.stop_reason = StopReason(StopKind.DAMAGE, f"{event.checkpoint} is damaged", now)
        case e.WorkerWaited():
            if (generation := _current(state, event.generation)) is not None:
                generation.wait(event.rank, event.waiting, now)
                generation.questions.pop(event.rank, None)
                generation.new_questions.discard(event.rank)
                if event.until_report is not None:
                    generation.questions[event.rank] = Question(event.until_report, event.until_validated)
                    generation.new_questions.add(event.rank)
        case e.WorkerFinished():
            if (generation := _current(state, event.generation)) is not None:
                generation.finish(event.rank)
                if event.rank == 0:
                    generation.return_value, generation.return_value_error = event.value, event.value_error
        case e.WorkerExited():
            if (generation := _current(state, event.generation)) is not None:
                _add_failure(generation, event.failure, now)
        case e.WorkersStopped():
            if event.agent in state.agents and event.master_port:
                state.agents[event.agent].master_port = event.master_port
            if (generation := _current(state, event.generation)) is not None:
                generation.alive.discard(event.agent)


def _current(state: State, generation: int) -> Generation | None:
    """The current generation if it has this number; None for an event of one that has ended."""
    return state.generation if state.generation is not None and state.generation.number == generation else None


def _add_failure(generation: Generation, failure: r.WorkerFailure, now: float) -> None:
    generation.fail(failure)
    why = f"rank {failure.rank} {failure.cause}"
    if generation.stop_reason is None:
        generation.stop_reason = StopReason(StopKind.FAILURE, why, now)
    elif generation.stop_reason.kind is StopKind.FAILURE and generation.cause is failure:
        generation.stop_reason.why = why  # what came before was only an echo of this


def _lose_agent(state: State, event: e.AgentLost, now: float, out: Output) -> None:
    agent = state.remove_agent(event.agent)
    if agent is None:
        return
    needed = state.generation is None and state.stop is None and state.fatal is None
    counted = needed and not agent.prepared and not agent.draining and not _is_spent(state)
    out.record(r.AgentRemoved(at=now, agent=agent.name, host=agent.host, why=event.why, counted=counted))
    if counted:
        state.not_before = now + state.spec.backoff_s(state.durable.streak - 1)  # the first of its kind is free
    bereft = pending_checkpoints.lose_agent(state, agent.name, now, out)
    generation = state.generation
    if generation is None or agent.name not in generation.alive:
        if generation is not None and agent.prepared and state.spec.spares:
            placement.want_more_agents(state, out)  # one that could not even be prepared is missed later
        return
    generation.alive.discard(agent.name)
    for rank in generation.ranks_of(agent.name):
        # A rank that has finished is lost all the same if a checkpoint that it reported is lost with it.
        if rank not in generation.finished or rank in bereft:
            if rank not in generation.failed:
                generation.lost_ranks.add(rank)
            cause = f"was lost with its node ({event.why})"
            failure = r.WorkerFailure(rank=rank, cause=cause, agent=agent.name, host=agent.host)
            _add_failure(generation, failure, now)


def _advance(state: State, now: float, out: Output) -> None:
    generation = state.generation
    if generation is not None:
        pending_checkpoints.complete(state, generation)
        pending_checkpoints.record_rank_metrics(state, generation, now, out)
        _note_start(state, generation, now, out)
        planned_change.advance(state, generation, now, out)
        _watch(state, generation, now, out)
        preemption.announce(generation, out)
        if generation.stop_reason is not None and not generation.alive:
            _close(state, generation, now, out)
    removal.apply_retention(state, now, out)
    pending_checkpoints.persist_next(state, now, out)
    validation.validate_next(state, out)
    if state.generation is not None:
        pending_checkpoints.answer_questions(state, state.generation, out)
    if state.generation is None and not state.pending:
        _end_or_start(state, now, out)
    elif state.generation is not None and state.generation.stop_reason is None and _all_finished(state):
        _finish(state, state.generation, now, out)
    if state.gives_back and not state.ended:
        placement.release_surplus(state, now, out)


def _finish(state: State, generation: Generation, now: float, out: Output) -> None:
    """Every rank has finished: end the run, once all is validated and callbacks have had a chance to fail it."""
    if validation.are_due(state):
        return
    if state.spec.has_callbacks and not generation.callbacks_finished:
        if not generation.finishing_callbacks:
            generation.finishing_callbacks = True
            out.do(c.FinishCallbacks(generation=generation.number))
        return
    value, error = generation.return_value, generation.return_value_error
    out.record(r.RunFinished(at=now, return_value=value, return_value_error=error))
    _end(state, c.RunStatus.FINISHED, out)


def _waits_to_validate(state: State) -> bool:
    """Whether every rank has finished, and validations are due which a run that is to stop does not begin."""
    return _all_finished(state) and state.validating is None and validation.are_due(state)


def _all_finished(state: State) -> bool:
    busy = state.pending or removal.is_under_way(state)
    return state.generation is not None and len(state.generation.finished) == state.generation.world_size and not busy


def _note_start(state: State, generation: Generation, now: float, out: Output) -> None:
    """Record that every worker runs, once they do."""
    if generation.running_since is None and not generation.starting and generation.stop_reason is None:
        generation.running_since = now
        state.checkpoint_interval.begin(now)
        pids = dict(sorted(generation.pids.items()))
        out.record(r.GenerationRunning(at=now, generation=generation.number, pids=pids))


def _watch(state: State, generation: Generation, now: float, out: Output) -> None:
    """Notice what silence means, and stop the generation when there is a reason to."""
    pending_checkpoints.warn_laggards(state, generation, now, out)
    if generation.stop_reason is None and state.fatal is not None:
        generation.stop_reason = StopReason(StopKind.FATAL, state.fatal[1], now)
    has_waited = now >= state.stop_at or _waits_to_validate(state)
    if generation.stop_reason is None and state.stop is not None and has_waited:
        generation.stop_reason = StopReason(StopKind.STOP, state.stop, now)
    hang_at = _hang_deadline(state, generation)
    if generation.stop_reason is None and hang_at is not None and now >= hang_at:
        for rank in generation.silence.longest:
            cause = f"made no report for {state.spec.progress_timeout_s:g} s and was taken for hung"
            agent = generation.agent_of(rank)
            host = state.agents[agent].host if agent in state.agents else ""
            generation.fail(r.WorkerFailure(rank=rank, cause=cause, agent=agent, host=host))
        generation.stop_reason = StopReason(
            StopKind.FAILURE, f"no progress for {state.spec.progress_timeout_s:g} s", now
        )
        _stop(generation, out, dump_stacks=True)
    elif generation.stop_reason is not None and not generation.stop_sent:
        until = catch_up_deadline(state, generation)
        if until is None or now >= until:
            _stop(generation, out, dump_stacks=False)


def catch_up_deadline(state: State, generation: Generation) -> float | None:
    """Until when ranks may go on after another one raised an exception; None: they are stopped at once.

    `report` does not wait for the other ranks, so the rank that raised may be ahead of those that are about to report
    the checkpoint of that very step. Where a rank died of a signal or with its node, nothing is waited for.
    """
    if generation.stop_reason is None or generation.stop_reason.kind is not StopKind.FAILURE:
        return None
    if not generation.may_catch_up or state.stop or state.fatal:
        return None
    return min(generation.failed_reported_at, generation.stop_reason.detected_at) + state.spec.catch_up_s


def _stop(generation: Generation, out: Output, *, dump_stacks: bool) -> None:
    generation.stop_sent = True
    if generation.alive:
        agents = tuple(sorted(generation.alive))
        out.do(c.StopWorkers(generation=generation.number, agents=agents, dump_stacks=dump_stacks))


def _excused(state: State, generation: Generation) -> bool:
    """While workers start, or a checkpoint is on its way to storage, silence is no sign of a hang."""
    return bool(generation.starting or any(p.persisting for p in state.pending.values()))


def _hang_deadline(state: State, generation: Generation) -> float | None:
    """When a rank is taken for hung, if it goes on saying nothing."""
    timeout_s, since = state.spec.progress_timeout_s, generation.silence.longest_since
    if timeout_s is None or since is None or _excused(state, generation):
        return None
    return since + timeout_s


def _close(state: State, generation: Generation, now: float, out: Output) -> None:
    """Record the end of the generation: its last worker is gone."""
    reason = generation.stop_reason
    assert reason is not None
    failed = reason.kind is StopKind.FAILURE and not pending_checkpoints.found_damage(state, generation)
    too_late = reason.kind is StopKind.DRAIN and generation.change is not None and generation.change.timed_out
    preempted = preemption.preemption_of(generation) if failed or too_late else None
    counted = failed and preempted is None
    cause = generation.cause
    bug_at = None
    if counted and cause is not None and may_be_deterministic(cause):
        bug_at = generation.base_iteration + generation.counts[cause.rank]
    if counted:
        quarantine.count_failure(state, generation, now, out)
    pending_checkpoints.complete_without_dead(state, generation, now, out)
    out.record(
        r.GenerationEnded(
            at=now,
            generation=generation.number,
            why=reason.why,
            detected_at=reason.detected_at,
            iteration=state.durable.iteration,
            counted=counted,
            planned=reason.kind in (StopKind.DRAIN, StopKind.RESIZE),
            failures=tuple(generation.failures) if reason.kind is StopKind.FAILURE else (),
            bug_at=bug_at,
            preemption=preempted,
        )
    )
    pending_checkpoints.drop_incomplete(state, now, out)
    pending_checkpoints.record_damage(state, generation, now, out)
    state.generation = None
    if reason.kind is StopKind.FAILURE and preempted is None:
        state.not_before = now + state.spec.backoff_s(state.durable.streak - 1)  # the first of its kind is free


def _end_or_start(state: State, now: float, out: Output) -> None:
    """No workers, nothing in flight: end the run, or form the next generation."""
    durable = state.durable
    if _waits_for_removal(state):
        return
    if state.fatal is not None:
        _fail(state, state.fatal, now, out)
    elif preemption.is_spent(state):
        last = durable.last_preemption
        assert last is not None
        out.record(r.RunFailed(at=now, error=preemption.reason(last), preemption=last))
        _end(state, c.RunStatus.FAILED, out)
    elif _is_spent(state):
        if durable.last_failures:
            cause = root_cause(durable.last_failures)
            error = f"rank {cause.rank} {cause.cause}"
            if durable.bug_count > 1:
                error += " (the same error at the same line after the same iteration, twice: it would come again)"
        else:
            error = f"an agent was lost while it prepared the training function ({durable.lost_agent})"
        out.record(r.RunFailed(at=now, error=error, failures=durable.last_failures))
        _end(state, c.RunStatus.FAILED, out)
    elif state.stop is not None:
        out.record(r.RunInterrupted(at=now, why=state.stop))
        _end(state, c.RunStatus.INTERRUPTED, out)
    elif not state.setting_aside:
        placement.start_generation(state, now, out)
        if state.fatal is not None:  # there is no way to form one, now or later
            _fail(state, state.fatal, now, out)


def _waits_for_removal(state: State) -> bool:
    """Whether a removal has to be answered first: before the end, since what became of it is written down; before a new
    generation only if that would load the very checkpoint."""
    if state.forced:
        return False
    if state.fatal is not None or state.stop is not None or _is_spent(state):
        return removal.is_under_way(state)
    return removal.removes_resume_point(state)


def _is_spent(state: State) -> bool:
    """Whether the run has failed more often than it may, or in a way that trying again does not mend."""
    if preemption.is_spent(state) or (state.spec.stop_on_repeated_error and state.durable.bug_count > 1):
        return True
    return 0 <= state.spec.max_failures < state.durable.failures


def _fail(state: State, fatal: tuple[FailureKind, str], now: float, out: Output) -> None:
    out.record(r.RunFailed(at=now, error_type=fatal[0], error=fatal[1], raised=state.raised))
    _end(state, c.RunStatus.FAILED, out)


def _end(state: State, status: c.RunStatus, out: Output) -> None:
    state.ended = True
    out.do(c.EndRun(status=status))

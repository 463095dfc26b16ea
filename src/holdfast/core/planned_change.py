"""Planned changes of the worker group: another size, off an agent that is drained, or the end of the run, without a
lost step.

The group is asked for a checkpoint that is its last. `HoldReports` has ranks stay in the report that carries a
checkpoint; where the function asks `should_checkpoint`, that says yes at the same call on every rank, and all of them
stay in their next report. Once every rank has made that report, none has made a later one, and its checkpoint is
committed, the generation is stopped. The next one starts from just there.

Ranks do not wait for each other in `report`, so some may have passed a report in which others stay. Those are then
sent on, to a report that nobody has reached. Only a rank that gives no part, of a function that neither asks nor has
its ranks in lockstep, may still report something while the last checkpoint is committed: that is done again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core import commands as c
from holdfast.core import records as r
from holdfast.core.events import Ticket
from holdfast.core.state import AgentState, Generation, PlannedChange, State, StopKind, StopReason

if TYPE_CHECKING:
    from holdfast.core.machine import Output

__all__ = ["advance", "deadlines"]

_LEAVE_S = 1.0
"""So long before its deadline a drained agent's workers are stopped, whether or not there was a checkpoint: it must not
look as if they had failed."""


def advance(state: State, generation: Generation, now: float, out: Output) -> None:
    """Plan a change if there is a reason, withdraw it if there is none any more, and go on with it."""
    _watch_growth(state, generation, now)
    if _is_ending(state, generation) or (state.stop is not None and now >= state.stop_at):
        return
    change, reason = generation.change, _reason(state, generation, now)
    if reason is None:
        if change is not None:
            generation.change = None
            _send(generation, None, now, out)
        return
    kind, why = reason
    if change is None:
        change = generation.change = PlannedChange(kind, why)
        told = why
        if kind is StopKind.STOP:
            told += f" (waited for {state.stop_at - now:.3g} s at most; a second time stops at once)"
        out.record(r.ChangePlanned(at=now, generation=generation.number, why=told))
        _send(generation, 0, now, out)
    elif change.why != why:
        change.kind, change.why = kind, why
    if any(now >= _leave_at(agent) for agent in _leaving(state, generation)):
        change.timed_out = True
        generation.stop_reason = StopReason(kind, f"{why}; its time is up", now)
    else:
        _gather(state, generation, change, now, out)


def deadlines(state: State, generation: Generation) -> list[float]:
    if _is_ending(state, generation):
        return []
    if state.stop is not None:
        return [state.stop_at]
    if len(generation.finished) == generation.world_size:
        return []
    times = []
    for agent in _leaving(state, generation):
        asked = generation.change is not None and generation.change.kind is StopKind.DRAIN
        times.append(_leave_at(agent) if asked else _ask_at(agent))
    if generation.change is None and (grow_at := _grow_at(state, generation)) is not None and not generation.finished:
        times.append(grow_at)
    return times


def _is_ending(state: State, generation: Generation) -> bool:
    """Whether it ends in any case, or does not run yet."""
    return generation.stop_reason is not None or generation.running_since is None or state.fatal is not None


# ---------------------------------------------------------------- reasons


def _reason(state: State, generation: Generation, now: float) -> tuple[StopKind, str] | None:
    """Why the group should change now, if it should."""
    if len(generation.finished) == generation.world_size:
        return None
    if state.stop is not None:
        return StopKind.STOP, state.stop
    has_room = state.ready_slots >= state.workers_min
    for agent in _draining(state, generation):
        if has_room or (agent.drain_deadline is not None and now >= _ask_at(agent)):
            return StopKind.DRAIN, f"agent {agent.name} is being drained: {agent.draining}"
    if generation.finished:
        return None
    if generation.world_size > state.workers_max and has_room:
        most = state.workers_max
        return StopKind.RESIZE, f"{most} {'worker' if most == 1 else 'workers'} at most may run now"
    if (grow_at := _grow_at(state, generation)) is not None and now >= grow_at:
        return StopKind.RESIZE, f"there is room for {_largest(state)} workers"
    return None


def _largest(state: State) -> int:
    """How many workers the next generation could have; 0: too few are ready for one."""
    return min(state.workers_max, state.ready_slots) if state.ready_slots >= state.workers_min else 0


def _grow_at(state: State, generation: Generation) -> float | None:
    """When the group is to grow, if there is room. Where somebody asked for it and all that was asked for is there,
    nothing is waited for.

    Preparing an agent may take as long as the settling time. Who joined meanwhile is known before it is prepared: as
    soon as no more are on their way, the time since the last one joined counts. Two changes are as far apart as ever.
    """
    since, settle_s = state.may_grow_since, state.spec.resize_settle_s
    if since is None or (state.bounds_changed and state.ready_slots >= state.workers_max):
        return since
    if generation.change is not None and generation.change.kind is StopKind.RESIZE:
        return since  # it has begun: who joins now does not put it off
    if state.ready_slots < state.slots:
        return since + settle_s
    return min(since + settle_s, max(since, max(state.joined_at, generation.started_at) + settle_s))


def _watch_growth(state: State, generation: Generation, now: float) -> None:
    """Whatever joins within the settling time makes one resize; who leaves before its end makes none."""
    if _largest(state) <= generation.world_size:
        state.may_grow_since = None
    elif state.may_grow_since is None:
        state.may_grow_since = now


def _draining(state: State, generation: Generation) -> list[AgentState]:
    """The agents of the generation that are to be taken away."""
    if not state.draining_agents:
        return []
    return [state.agents[name] for name in state.draining_agents if generation.ranks_of(name)]


def _leaving(state: State, generation: Generation) -> list[AgentState]:
    """Those of them that have a deadline."""
    return [agent for agent in _draining(state, generation) if agent.drain_deadline is not None]


def _leave_at(agent: AgentState) -> float:
    assert agent.drain_deadline is not None
    return max(agent.drain_deadline - _LEAVE_S, agent.draining_since)


def _ask_at(agent: AgentState) -> float:
    """Where no other agent has room for its workers, they are stopped only when half of the time is over: another agent
    may join."""
    assert agent.drain_deadline is not None
    return (agent.draining_since + _leave_at(agent)) / 2


# ---------------------------------------------------------------- the last checkpoint


def _gather(state: State, generation: Generation, change: PlannedChange, now: float, out: Output) -> None:
    """Bring all ranks to one report that carries a checkpoint, and stop them once that is committed."""
    lowest, furthest = generation.lowest_held, generation.furthest
    if lowest is None:
        return
    if lowest < furthest:
        if furthest in generation.held.values():
            number = furthest
        else:
            number, change.margin = furthest + change.margin, change.margin * 2
        _send(generation, number, now, out)
    elif not generation.has_reached(furthest):
        if change.number < furthest:  # ranks that give no part are to stay there, too
            _send(generation, furthest, now, out)
    elif Ticket(generation.number, furthest) not in state.pending:
        newest = state.durable.resume_point()
        at = (generation.number, generation.base_iteration + furthest)
        if newest is not None and (newest.generation, newest.iteration) == at:
            generation.stop_reason = StopReason(change.kind, change.why, now)
        else:  # there was no checkpoint, or it could not be committed
            _send(generation, furthest + 1, now, out)


def _send(generation: Generation, number: int | None, now: float, out: Output) -> None:
    """Have ranks stay in reports from this one on, and go on from earlier ones."""
    generation.release(number, now)
    if generation.change is not None and number is not None:
        generation.change.number = number
    agents = tuple(sorted(generation.alive))
    out.do(c.HoldReports(generation=generation.number, number=number, agents=agents))

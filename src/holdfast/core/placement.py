"""Forming a generation: which agents, which ranks where, from which checkpoint, and when.

Placement keeps the order in which agents joined, so that rank 0 stays where it is as long as its node lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core import records as r
from holdfast.core.failure_kind import FailureKind
from holdfast.core.neighbours import neighbours
from holdfast.core.state import AgentState, Generation, State

if TYPE_CHECKING:
    from holdfast.core.machine import Output

__all__ = [
    "agent_unavailable",
    "deadlines",
    "place",
    "release_surplus",
    "spare_agents",
    "start_generation",
    "want_more_agents",
]

_REFUSALS_LIMIT = 3
"""So many times in a row the engine may fail to start an agent that the run cannot do without."""


def deadlines(state: State) -> list[float]:
    if state.pending:
        return []  # an outcome comes first
    if state.not_before > 0:
        return [state.not_before]
    if state.enough_since is not None:
        return [state.enough_since + state.spec.last_call_s]
    return [] if state.agents_wanted_since is None else [state.agents_wanted_since + state.spec.agents_timeout_s]


def agent_unavailable(state: State, event: e.AgentUnavailable, now: float) -> None:
    """The engine could not start an agent: ask again later, unless it fails again and again."""
    state.requested_slots = max(0, state.requested_slots - event.slots)
    if state.generation is not None or state.ready_slots >= state.workers_min:
        return  # the run can do without
    state.failed_requests += 1
    state.not_before = max(state.not_before, now + state.spec.backoff_s(state.failed_requests))
    if state.failed_requests >= _REFUSALS_LIMIT:
        state.fatal = (FailureKind.RUN, f"No agent could be started: {event.why}")


def start_generation(state: State, now: float, out: Output) -> None:
    """Start the next generation if it is time and enough agents are ready; otherwise ask for what is missing."""
    if now < state.not_before:
        return
    state.not_before = 0.0
    if state.ready_slots < state.workers_min:
        state.enough_since = None
        _want_agents(state, now, out)
        return
    if _is_last_call(state, now):
        return
    state.agents_wanted_since = state.enough_since = state.may_grow_since = None
    state.bounds_changed = False
    want_more_agents(state, out)
    places = place(state)
    first = state.agents[places[0].agent]
    world_size = sum(len(one.ranks) for one in places)
    newest = state.durable.resume_point()
    number = state.durable.generation + 1
    iteration = newest.iteration if newest else 0
    agents = tuple(one.agent for one in places)
    out.record(
        r.GenerationStarted(
            at=now,
            generation=number,
            world_size=world_size,
            agents=agents,
            iteration=iteration,
            checkpoint=newest.name if newest else None,
        )
    )
    state.generation = Generation(
        number=number,
        places=places,
        base_iteration=iteration,
        checkpoint=newest.name if newest else None,
        started_at=now,
    )
    out.do(
        c.StartWorkers(
            generation=number,
            world_size=world_size,
            places=places,
            node_count=len(places),
            checkpoint=newest.name if newest else None,
            token=newest.token if newest else "",
            neighbours=neighbours(state, newest),
            iteration=iteration,
            restart_count=number - 1,
            master_address=first.address,
            master_port=first.master_port,
            has_validation=state.spec.has_validation,
            all_metrics=state.spec.has_callbacks,
        )
    )


def place(state: State) -> tuple[c.Place, ...]:
    """Fill ready agents in the order in which they joined, up to the largest world that is wanted."""
    places: list[c.Place] = []
    next_rank = 0
    for agent in state.agents.values():
        count = min(agent.slots, state.workers_max - next_rank)
        if agent.is_ready and count > 0:
            ranks = tuple(range(next_rank, next_rank + count))
            places.append(c.Place(agent=agent.name, node_rank=len(places), ranks=ranks))
            next_rank += count
    return tuple(places)


def _is_last_call(state: State, now: float) -> bool:
    """Whether a run that waited for agents waits for more than it needs, since others may be about to join. One that
    lost an agent and has enough left goes on at once."""
    if state.agents_wanted_since is None or state.ready_slots >= state.workers_max:
        return False
    if state.enough_since is None:
        state.enough_since = now
    return now < state.enough_since + state.spec.last_call_s


def release_surplus(state: State, now: float, out: Output) -> None:
    """Give back places beyond the bounds, of agents without workers first, as soon as nothing of the run is there."""
    left, in_use, spares = state.workers_max, state.agents_in_use(), spare_agents(state)
    surplus = False
    for agent in _by_need(state):
        wanted = agent.slots if agent.name in spares else min(agent.slots, left)
        left = max(0, left - wanted)
        used = len(state.generation.ranks_of(agent.name)) if state.generation is not None else 0
        keep = max(wanted, used, 1 if agent.name in in_use else 0)
        surplus = surplus or keep > wanted
        if keep == agent.slots:
            continue
        out.do(c.ReleasePlaces(agent=agent.name, keep=keep, held=agent.slots))
        if keep:
            state.resize_agent(agent.name, keep)
        else:
            state.remove_agent(agent.name)
            out.record(r.AgentRemoved(at=now, agent=agent.name, host=agent.host, why="the run needs it no longer"))
    state.gives_back = surplus


def spare_agents(state: State) -> tuple[str, ...]:
    """The agents that are kept idle: all workers that the run may have fit on others."""
    left, found = state.workers_max, list[str]()
    for agent in _by_need(state) if state.spec.spares else ():
        if left <= 0 and len(found) < state.spec.spares:
            found.append(agent.name)
        left -= agent.slots
    return tuple(found)


def _by_need(state: State) -> list[AgentState]:
    """The agents that are not taken away: those that have workers, then the others, in the order in which they
    joined."""
    generation = state.generation
    agents = [agent for agent in state.agents.values() if not agent.draining]
    return agents if generation is None else sorted(agents, key=lambda agent: not generation.ranks_of(agent.name))


def want_more_agents(state: State, out: Output) -> None:
    """The run can do without, and grows when they come, or has them in reserve."""
    missing = max(0, state.workers_max - state.slots) + state.spec.spares - len(spare_agents(state))
    if missing > 0:
        state.requested_slots = missing
        out.do(c.RequestAgents(slots=missing))


def _want_agents(state: State, now: float, out: Output) -> None:
    if state.agents_wanted_since is None:
        state.agents_wanted_since = now
    missing = state.workers_max + state.spec.spares - state.slots - state.requested_slots
    if now >= state.agents_wanted_since + state.spec.agents_timeout_s:
        why = (
            f"Only {state.ready_slots} of the {state.workers_min} workers that the run needs could be placed "
            f"within {state.spec.agents_timeout_s:g} s; add nodes or lower ScalingConfig(num_workers)."
        )
        state.fatal = FailureKind.RUN, f"{why} {state.refusal}".rstrip()
        state.agents_wanted_since = None
    elif missing > 0:
        state.requested_slots += missing
        out.do(c.RequestAgents(slots=missing))

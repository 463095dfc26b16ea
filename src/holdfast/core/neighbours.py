"""Which agents have a committed checkpoint in memory, for those that lack it: they need not read it from storage.

Not durable, and never relied upon: an agent that is asked in vain says so. Only the checkpoint that was committed last
is remembered, since a generation starts from that one, unless it is damaged. Agents give what they have only where
nodes do not share the run's storage (`AgentPrepared.snapshot_port`).
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.checkpoint_types import StoredCheckpoint
from holdfast.core.commands import Neighbour
from holdfast.core.state import CheckpointInMemory, Generation, State

__all__ = ["committed", "neighbours", "started"]


def committed(state: State, stored: StoredCheckpoint, agents: Iterable[str]) -> None:
    """These agents gave parts of a checkpoint that is committed now."""
    known = sorted(set(agents) & state.agents.keys())
    state.in_memory = CheckpointInMemory(stored.token, dict.fromkeys(known))


def started(state: State, generation: Generation, agent: str) -> None:
    """An agent has started workers of the generation, and so has what they start from, if neighbours gave it."""
    stored = state.durable.checkpoints.get(generation.checkpoint or "")
    if stored is not None and stored.token == state.in_memory.token and agent in state.agents:
        state.in_memory.agents.setdefault(agent)


def neighbours(state: State, stored: StoredCheckpoint | None) -> tuple[Neighbour, ...]:
    """Whom to ask for this checkpoint; those that gave parts of it come first."""
    if stored is None or stored.token != state.in_memory.token:
        return ()
    agents = [state.agents[name] for name in state.in_memory.agents]
    return tuple(
        Neighbour(agent=one.name, address=one.address, port=one.snapshot_port)
        for one in agents
        if one.address and one.snapshot_port
    )

"""Nodes that are taken away while a generation has workers there: what workers are told, and what counts.

A generation that ends because such a node did is a preemption, which has a budget of its own. Whatever else happens
there, such as an exception of the training function or a lack of memory, is a failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.core import commands as c
from holdfast.core.records import Preemption
from holdfast.core.state import AgentState, Generation, State

if TYPE_CHECKING:
    from holdfast.core.machine import Output

__all__ = ["add_drain", "announce", "is_spent", "preemption_of", "reason"]


_SIGTERM = 15


def add_drain(generation: Generation | None, agent: AgentState) -> None:
    """An agent is being drained: workers that run there, and their peers, have to be told."""
    if generation is None or not (ranks := generation.ranks_of(agent.name)):
        return
    before = generation.preemption
    deadlines = [agent.drain_deadline, before.deadline if before is not None else None]
    generation.preemption = Preemption(
        deadline=min((one for one in deadlines if one is not None), default=None),
        ranks={**(before.ranks if before is not None else {}), agent.name: ranks},
    )
    generation.preemption_announced = False


def announce(generation: Generation, out: Output) -> None:
    """Tell all workers of what is taken away, once they run."""
    found = generation.preemption
    if found is None or generation.preemption_announced or generation.running_since is None:
        return
    generation.preemption_announced = True
    agents = tuple(sorted(generation.alive))
    out.do(c.AnnouncePreemption(generation=generation.number, preemption=found, agents=agents))


def preemption_of(generation: Generation) -> Preemption | None:
    """What was taken away, if that is what ended the generation: it had to leave a node without a last checkpoint, or
    its root cause is that such a node was lost, or that a worker there got SIGTERM, as all processes of a machine do
    that is shut down."""
    cause, found = generation.cause, generation.preemption
    if found is None:
        return None
    if generation.change is not None and generation.change.timed_out:
        return msgspec.structs.replace(found, timed_out=True)
    if cause is None or cause.agent not in found.ranks:
        return None
    return found if cause.rank in generation.lost_ranks or cause.signal == _SIGTERM else None


def is_spent(state: State) -> bool:
    """Whether nodes were taken away more often than the run may survive."""
    return 0 <= state.spec.max_preemption_failures < state.durable.preemptions


def reason(preemption: Preemption) -> str:
    """For people."""
    nodes = ", ".join(sorted(preemption.ranks))
    return f"nodes were taken away more often than FailureConfig(max_preemption_failures) allows, at last {nodes}"

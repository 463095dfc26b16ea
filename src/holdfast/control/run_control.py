"""What control clients learn of a run, and what they may do with it (`api` serves them).

Everything that changes a run becomes an event of its core, as a signal would; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.control.driver_thread import grace_s
from holdfast.control.recent_logs import RecentLogs
from holdfast.control.run_agents import RunAgents
from holdfast.core import bounds
from holdfast.core.admission import capacity
from holdfast.core.events import BoundsRequested, Event, StopRequested
from holdfast.core.placement import spare_agents
from holdfast.core.resources import Offer
from holdfast.core.state import State
from holdfast.views.formatting import bounds_text
from holdfast.wire import control_messages as cm

__all__ = ["SCALED_BY_CLIENT", "STOPPED_BY_CLIENT", "RunControl", "RunFacts"]

STOPPED_BY_CLIENT = "holdfast stop"
"""Why a run ended that a control client stopped."""


SCALED_BY_CLIENT = "holdfast scale"
"""Why bounds changed that a control client set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What does not change while a controller has the run."""

    name: str
    uri: str
    host: str
    pid: int
    started_at: float


class RunControl:
    """One run, for control clients. Used from the hub's event loop only."""

    def __init__(
        self,
        facts: RunFacts,
        state: State,
        agents: RunAgents,
        logs: RecentLogs,
        post: Callable[[Event], None],
        join_string: str,
        known_offers: Callable[[], Sequence[Offer]] | None = None,
    ) -> None:
        self.logs = logs
        self.stop: Callable[[StopRequested], None] = post
        """Ends the run as a signal to its driver would; `hub_thread` has it interrupt the driver's thread as well."""
        self._facts = facts
        self._state = state
        self._agents = agents
        self._post = post
        self._join_string = join_string
        self._known_offers = known_offers

    def answer(self, request: cm.RunRequest) -> cm.ControlReply:
        match request:
            case cm.GetStatus():
                return self._status()
            case cm.StopRun(force=force):
                self.stop(StopRequested(why=STOPPED_BY_CLIENT, force=force, grace_s=grace_s()))
                return cm.Done(text=f"Run {self._facts.name} is being stopped.")
            case cm.DrainNode(node=node, deadline_s=deadline_s):
                if text := self._agents.drain_node(node, "holdfast drain", deadline_s):
                    return cm.Done(text=text)
                return cm.Refused(
                    reason=f"This driver has no agent named {node!r}, and none on such a host: see holdfast status."
                )
            case cm.SetWorkers(workers_min=workers_min, workers_max=workers_max):
                return self._set_workers(workers_min, workers_max)
            case cm.GetJoinString():
                return cm.Done(text=self._join_string)
            case cm.ReadLogs():
                raise AssertionError(request)  # which `api` answers

    def _set_workers(self, workers_min: int, workers_max: int) -> cm.ControlReply:
        if problem := bounds.find_problem(self._state, workers_min, workers_max):
            return cm.Refused(reason=problem)
        gang = self._agents.gang.with_bounds(workers_min, workers_max)
        if self._known_offers is not None and (most := capacity(gang, self._known_offers())) < workers_min:
            reason = f"The run cannot have {workers_min} workers: this machine has room for {most}; ask for no more."
            return cm.Refused(reason=reason)
        self._post(BoundsRequested(workers_min=workers_min, workers_max=workers_max, why=SCALED_BY_CLIENT))
        generation = self._state.generation
        size = generation.world_size if generation is not None else 0
        text = f"Run {self._facts.name} may have {bounds_text(workers_min, workers_max)} from now on"
        if size < workers_min:
            return cm.Done(text=f"{text}: it has {size}, and gets the others as soon as there is room for them.")
        if size > workers_max:
            return cm.Done(text=f"{text}: it has {size}, and gives up the others after its next checkpoint.")
        return cm.Done(text=f"{text}: it has {size} now.")

    def _status(self) -> cm.RunStatusReply:
        state, facts = self._state, self._facts
        generation, newest = state.generation, state.durable.resume_point()
        return cm.RunStatusReply(
            name=facts.name,
            uri=facts.uri,
            phase=self._phase(),
            host=facts.host,
            pid=facts.pid,
            started_at=facts.started_at,
            workers_min=state.workers_min,
            workers_max=state.workers_max,
            generation=state.durable.generation,
            world_size=generation.world_size if generation is not None else 0,
            iteration=state.durable.iteration,
            metrics=state.durable.metrics or {},
            checkpoint=newest.name if newest is not None else "",
            checkpoint_iteration=newest.iteration if newest is not None else 0,
            failures=state.durable.failures,
            max_failures=state.spec.max_failures,
            preemptions=state.durable.preemptions,
            max_preemption_failures=state.spec.max_preemption_failures,
            waiting_for=self._agents.waiting_for,
            agents=self._agents.statuses(self._ranks(), self._spares()),
        )

    def _phase(self) -> cm.RunPhase:
        state = self._state
        if state.stop is not None or state.fatal is not None or state.ended:
            return cm.RunPhase.STOPPING
        if state.generation is None:
            return cm.RunPhase.WAITING
        return cm.RunPhase.STARTING if state.generation.running_since is None else cm.RunPhase.RUNNING

    def _spares(self) -> list[str]:
        """Agents that are kept idle, and could start workers now."""
        return [agent for agent in spare_agents(self._state) if self._state.agents[agent].prepared]

    def _ranks(self) -> dict[str, tuple[int, ...]]:
        """The ranks on each agent."""
        if self._state.generation is None:
            return {}
        return {place.agent: place.ranks for place in self._state.generation.places}

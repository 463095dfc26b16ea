"""The agents of an engine, shared by runs: accepting them, placing runs on them, and noticing when one is gone.

Which run gets places on which agent is `core.admission`'s decision, which is carried out here. What an agent sends goes
to the run that the message names, if that run has places there, and to no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from holdfast.control.agent_link import AgentLink, send_all
from holdfast.control.run_agents import RunAgents
from holdfast.core import events as e
from holdfast.core.admission import Admission, Decision, Grant, Revoke, capacity
from holdfast.core.agent_phase import AgentPhase
from holdfast.core.resources import Offer
from holdfast.engines.engine import ControllerEndpoint, Engine, MakeEngine
from holdfast.wire import messages as m
from holdfast.wire.channel import Channel
from holdfast.wire.control_messages import AgentStatus

__all__ = ["AgentPool"]

_log = logging.getLogger(__name__)
_LAST_WORD_S = 1.0
"""A dying process closes its connection before the kernel says that it is dead: on a busy machine, long before."""


class AgentPool:
    """Every agent of one engine by name. Used from the hub's event loop only."""

    def __init__(self, make_engine: MakeEngine, endpoint: ControllerEndpoint, *, private: bool = False) -> None:
        """`private`: the engine is one run's own, and ends with it."""
        self.is_closed = False
        self._private = private
        self.links: dict[str, AgentLink] = {}
        self._joined: dict[str, e.AgentJoined] = {}
        """What each agent said that ever joined."""
        self._runs: dict[str, RunAgents] = {}
        self._admission = Admission()
        self._engine: Engine = make_engine(endpoint, self._process_gone)

    # ------------------------------------------------------------ runs

    def enter(self, run: RunAgents) -> None:
        self._runs[run.id] = run

    def request(self, run: RunAgents) -> None:
        """The run wants its gang, or what it lost of it. May be asked again and again."""
        if not self._admission.has_asked(run.id):
            self._follow(self._admission.ask(run.gang))
        if self._admission.is_waiting(run.id):
            try:
                self._engine.want(self._admission.gangs)
            except OSError as error:
                run.unavailable(str(error))

    def withdraw(self, run: RunAgents) -> None:
        """The run is over; what it holds is its own until it is released."""
        self._follow(self._admission.withdraw(run.id))

    def release(self, run: RunAgents, agent: str) -> None:
        """Nothing of the run is left on the agent."""
        self._follow(self._admission.release(run.id, agent))

    async def leave(self, run: RunAgents, flush_s: float) -> None:
        """The run has gone; whatever of it is left somewhere is no longer its own."""
        for agent in list(self._admission.held(run.id)):
            self.release(run, agent)
        del self._runs[run.id]
        if self._private:
            await self.close(flush_s)

    def kill(self, agent: str, run: RunAgents) -> None:
        """Kill an agent, unless other runs have places there."""
        if not set(self._admission.holders(agent)) - {run.id}:
            self._engine.kill(agent)

    def _follow(self, decisions: Sequence[Decision]) -> None:
        for one in decisions:
            match one:
                case Grant():
                    self._runs[one.run].granted(self.links[one.agent], self._joined[one.agent], one.workers)
                case Revoke():
                    self._runs[one.run].revoke(one.agent)

    # ------------------------------------------------------------ connections

    def knows(self, agent: str) -> bool:
        """Whether the engine has started an agent of this name, which has not ended."""
        return self._engine.knows(agent)

    async def serve(self, channel: Channel[m.AgentMessage]) -> None:
        """One agent's connection, from its `AgentJoined` to its end."""
        first = await channel.recv()
        joined = None if first is None else first.message
        if not isinstance(joined, e.AgentJoined) or joined.agent != channel.agent:
            return
        link = AgentLink(channel, channel.agent)
        # The end of its former connection may be noticed long after the agent has connected again.
        self.lose_agent(link.name, "it connected anew")
        self.links[link.name] = link
        self._joined[link.name] = joined
        self._follow(self._admission.agent_joined(link.name, _offer(joined)))
        try:
            while (envelope := await channel.recv()) is not None and _is_of(link.name, envelope.message):
                link.unanswered_pings = 0
                run = self._runs.get(envelope.run)
                if run is not None and run.links.get(link.name) is link:
                    run.receive(link.name, envelope.message)
            with suppress(TimeoutError):  # where the engine knows how it died, it says so soon
                async with asyncio.timeout(_LAST_WORD_S):
                    await link.gone.wait()
        finally:
            self.lose(link, "its connection closed")

    def lose(self, link: AgentLink, why: str) -> None:
        """End one connection. The agent is lost with it, unless another connection has taken its place."""
        link.gone.set()
        link.abort()
        if self.links.get(link.name) is link:
            del self.links[link.name]
            self._engine.abandon(link.name)
            for run in list(self._admission.holders(link.name)):
                self._runs[run].lost(link.name, why)
            self._follow(self._admission.agent_lost(link.name))

    def lose_agent(self, agent: str, why: str) -> None:
        """The agent is gone, and so is its connection, whichever that is now."""
        if (link := self.links.get(agent)) is not None:
            self.lose(link, why)

    def ping(self, limit: int, silence_s: float) -> None:
        """Send a ping to each agent; one that left `limit` of them unanswered (a stopped process, a dead network) is
        lost."""
        for link in [link for link in self.links.values() if link.unanswered_pings >= limit]:
            self.lose(link, f"it was silent for {silence_s:g} s: {limit} pings were not answered")
            self._engine.kill(link.name)
        for link in self.links.values():
            link.unanswered_pings += 1
        send_all(self.links.values(), m.Ping())

    def tell_waiting(self) -> None:
        """Tell runs that wait only because others have the places that it is so: their patience is for agents."""
        waiting = self._admission.waiting
        offers = [_offer(joined) for joined in map(self._joined.__getitem__, self.links)] if waiting else []
        for gang in waiting:
            if capacity(gang, offers) == gang.workers:
                self._runs[gang.run].must_wait()

    def statuses(self) -> list[AgentStatus]:
        """Every agent that there is, or that is expected."""
        return [
            AgentStatus(agent=agent, host=self._joined[agent].host, phase=AgentPhase.JOINED) for agent in self.links
        ]

    def forgive(self) -> None:
        """Forget unanswered pings, since this process itself stood still and could not read the answers."""
        for link in self.links.values():
            link.unanswered_pings = 0

    async def close(self, flush_s: float) -> None:
        """End the agents; each may take `flush_s`."""
        self.is_closed = True
        send_all(self.links.values(), m.Shutdown(flush_s=flush_s))
        await self._engine.close(flush_s)

    def _process_gone(self, agent: str, why: str) -> None:
        """The agent's process has ended: what its closed connection may have told already, or will."""
        self.lose_agent(agent, why)
        waiting = [self._runs[gang.run] for gang in self._admission.waiting]
        for run in waiting:
            if agent not in self._joined:
                run.unavailable(why)
            elif run.waits:
                self.request(run)  # the engine may have counted on this one


def _offer(joined: e.AgentJoined) -> Offer:
    return Offer(resources=joined.resources, gpus=joined.gpus, slots=joined.slots or None)


def _is_of(agent: str, message: m.AgentMessage) -> bool:
    """Whether a message is about the agent that sent it, or about its workers: it may change no other agent's state."""
    match message:
        case (
            e.AgentPrepared(agent=named)
            | e.WorkersStarted(agent=named)
            | e.DamageFound(agent=named)
            | e.WorkersStopped(agent=named)
        ):
            if named != agent:
                _log.warning("The connection of agent %s is closed: it sent a message of agent %s.", agent, named)
            return named == agent
        case _:
            return True

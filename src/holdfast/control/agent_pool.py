"""The agents of an engine, shared by runs: accepting them, placing runs on them, and noticing when one is gone.

An agent whose connection breaks and that comes back within its silence limit goes on where it was, and no run learns
of it. Which run gets places on which agent is `core.admission`'s decision, which is carried out here. What an agent
sends goes to the run that the message names, if that run has places there, and to no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from holdfast.control.agent_link import AgentLink, send_all
from holdfast.control.run_agents import RunAgents
from holdfast.core import events as e
from holdfast.core.admission import Admission, Decision, Grant, Revoke, capacity
from holdfast.core.agent_phase import AgentPhase
from holdfast.core.resources import Offer
from holdfast.core.torch_version import find_torch_mismatch
from holdfast.engines.engine import AgentChange, ControllerEndpoint, Engine, MakeEngine
from holdfast.views.formatting import count_text
from holdfast.wire import messages as m
from holdfast.wire.channel import Channel
from holdfast.wire.control_messages import AgentStatus
from holdfast.wire.frames import encode_body
from holdfast.wire.resumable_channel import ResumableChannel, read_opening, refuse

__all__ = ["AgentPool"]

_log = logging.getLogger(__name__)
_SETTLE_S = 0.01
_READMIT_S = 1.0
"""How soon it is looked again whether an agent that was set aside has been left."""
_REDIAL_LOOKS = 10
_LAST_WORD_S = 1.0
"""A dying process closes its connection before the kernel says that it is dead: on a busy machine, long before."""


class _Drain(NamedTuple):
    """Why an agent is taken away, and when."""

    why: str
    deadline: float | None = None
    """By the event loop's clock; None: it stays until its runs have left."""

    @property
    def left_s(self) -> float | None:
        """How much time is left."""
        return None if self.deadline is None else max(0.0, self.deadline - asyncio.get_running_loop().time())


class AgentPool:
    """Every agent of one engine by name. Used from the hub's event loop only."""

    def __init__(
        self, make_engine: MakeEngine, endpoint: ControllerEndpoint, silence_s: float, *, private: bool = False
    ) -> None:
        """An agent that is silent for `silence_s` is lost. `private`: the engine is one run's own, and ends with it."""
        self.is_closed = False
        self._silence_s = silence_s
        self._private = private
        self.links: dict[str, AgentLink] = {}
        self._joined: dict[str, e.AgentJoined] = {}
        """What each agent said that ever joined."""
        self._runs: dict[str, RunAgents] = {}
        self._admission = Admission()
        self._pending: dict[str, None] = {}
        """Agents that the engine has begun to start and that have not joined, in that order."""
        self._draining: dict[str, _Drain] = {}
        """Agents that get nothing new."""
        self._set_aside: dict[str, _Drain] = {}
        """Hosts on which too much failed, until when."""
        self._leaving: set[str] = set()
        """Those of them that asked for it themselves, and end when nothing is left there."""
        self._stood_still_at = -float("inf")
        """When this process last found that it had not run for a while."""
        self._engine: Engine = make_engine(endpoint, self._agent_changed)

    # ------------------------------------------------------------ runs

    def enter(self, run: RunAgents) -> None:
        self._runs[run.id] = run

    def request(self, run: RunAgents) -> None:
        """The run wants its gang, or what it lost of it. May be asked again and again."""
        if not self._admission.has_asked(run.id):
            self._follow(self._admission.ask(run.gang))
            for agent in self.links:
                self._find_mismatch(run, agent)
        if self._admission.would_take_more(run.id):
            try:
                self._engine.want(self._admission.gangs)
            except OSError as error:
                run.unavailable(str(error))

    def _find_mismatch(self, run: RunAgents, agent: str) -> str | None:
        """Tell a run of an agent that it cannot use, and why."""
        why = find_torch_mismatch(agent, self._joined[agent].torch, run.gang.torch)
        if why is not None:
            run.refused(agent, why)
        return why

    def resize(self, run: RunAgents) -> None:
        """The run's gang has another size."""
        self._follow(self._admission.resize(run.gang))

    def give_back(self, run: RunAgents, agent: str, count: int) -> None:
        """The run keeps all but its last `count` places on the agent."""
        self._follow(self._admission.give_back(run.id, agent, count))

    def leave_agent(self, run: RunAgents, agent: str) -> None:
        """The run is about to release all its places on the agent."""
        self._follow(self._admission.leave(run.id, agent))

    def withdraw(self, run: RunAgents) -> None:
        """The run is over; what it holds is its own until it is released."""
        self._follow(self._admission.withdraw(run.id))

    def release(self, run: RunAgents, agent: str) -> None:
        """Nothing of the run is left on the agent."""
        self._follow(self._admission.release(run.id, agent))
        self._let_leave(agent)

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
        """One connection of an agent: its first, or one by which it comes back."""
        opening = await read_opening(channel)
        if opening is None:
            return
        link = self.links.get(channel.agent)
        if why := self._why_not(link, opening):
            await refuse(channel, why)
        elif link is not None and opening.received is not None:
            link.unanswered_pings = 0
            link.connections += 1
            link.channel.accept(channel, opening, self._silence_s)
            await self._receive(link)
        else:
            await self._join(channel, opening)

    def _why_not(self, link: AgentLink | None, opening: m.OpenChannel) -> str | None:
        """Why a connection is refused; `link` is the agent of that name, if it has joined."""
        if opening.received is not None:
            known = link is not None and link.channel.incarnation == opening.incarnation
            if link is None or not known or not link.channel.can_resume(opening.received):
                return "This controller does not know the agent's channel any more: it was lost meanwhile."
        elif link is not None and link.channel.is_connected:
            return (
                f"An agent named {link.name!r} is connected already, from {link.channel.peer}: give this one another "
                "name, or end the other first."
            )
        return None

    async def _join(self, channel: Channel[m.AgentMessage], opening: m.OpenChannel) -> None:
        resumable: ResumableChannel[m.AgentMessage] = ResumableChannel(
            channel.agent, opening.incarnation, comes_back=opening.comes_back
        )
        resumable.accept(channel, opening, self._silence_s)
        try:
            async with asyncio.timeout(self._silence_s):
                first = await resumable.recv()
        except TimeoutError:  # nobody pings it yet, so nothing else would find out
            resumable.abort()
            if self._engine.knows(channel.agent):
                self._engine.kill(channel.agent)
            return
        joined = None if first is None else first.message
        if not isinstance(joined, e.AgentJoined) or joined.agent != channel.agent:
            return
        link = AgentLink(resumable)
        self.lose_agent(link.name, "another one has joined under its name")
        while not all(run.may_rejoin(link.name) for run in self._runs.values()):
            # What a run has decided for the one that is lost, and is about to send, must not reach this one.
            await asyncio.sleep(_SETTLE_S)
        if link.name in self.links or not resumable.is_connected:
            return
        self.links[link.name] = link
        self._joined[link.name] = joined
        self._pending.pop(link.name, None)
        if self.is_closed:
            link.send(m.Shutdown(flush_s=0.0))  # it was being started when the last run ended
        aside = self._set_aside.get(joined.host)
        if aside is not None and aside.left_s:
            self._draining[link.name] = _Drain(aside.why)
            self._readmit_later(link)
        else:
            self._follow(self._admission.agent_joined(link.name, _offer(joined)))
        asking = [self._runs[gang.run] for gang in self._admission.gangs]
        refused = [self._find_mismatch(run, link.name) for run in asking]
        if refused and all(refused):
            self._engine.kill(link.name)  # one that was started for them
        await self._receive(link)

    async def _receive(self, link: AgentLink) -> None:
        """Receive an agent's messages until its connection is over. It is lost with it, unless it will come back."""
        is_over = True
        try:
            while (envelope := await link.channel.recv()) is not None and _is_of(link.name, envelope.message):
                link.unanswered_pings = 0
                if isinstance(envelope.message, m.Pong):
                    link.answered()
                    continue
                if isinstance(envelope.message, m.Leave):
                    self.lose(link, "it ended")
                    return
                if isinstance(envelope.message, e.AgentDraining):
                    self._leaving.add(link.name)
                    self.drain(link.name, envelope.message.why, envelope.message.deadline_s)
                    self._let_leave(link.name)
                run = self._runs.get(envelope.run)
                if run is not None and run.links.get(link.name) is link:
                    run.receive(link.name, envelope.message)
            if envelope is None and link.channel.comes_back:
                is_over = False  # another connection has come already, or comes while pings are waited for
                if link.channel.is_closed_by_peer and (redial_s := link.redial_s()) is not None:
                    self._expect_back(link, link.connections, redial_s / _REDIAL_LOOKS, _REDIAL_LOOKS)
                return
            with suppress(TimeoutError):  # where the engine knows how it died, it says so soon
                async with asyncio.timeout(_LAST_WORD_S):
                    await link.gone.wait()
        finally:
            if is_over:
                self.lose(link, "its connection closed")

    def _expect_back(self, link: AgentLink, connections: int, pause_s: float, looks: int) -> None:
        """Lose an agent whose machine has closed its connection, and that does not connect again although the network
        works: its process is dead. Many short pauses, so that a busy event loop does not count as a long one."""
        loop = asyncio.get_running_loop()
        if link.gone.is_set() or link.connections != connections:
            return
        if looks:
            loop.call_later(pause_s, self._expect_back, link, connections, pause_s, looks - 1)
        elif loop.time() - self._stood_still_at > self._silence_s:
            self.lose(link, "its process ended: the connection was closed, and it did not connect again")

    def lose(self, link: AgentLink, why: str) -> None:
        """End an agent's channel. The agent is lost with it, unless another of its name has taken its place."""
        link.gone.set()
        link.channel.abort()
        if self.links.get(link.name) is link:
            del self.links[link.name]
            self._draining.pop(link.name, None)
            self._leaving.discard(link.name)
            self._engine.abandon(link.name)
            for run in list(self._admission.holders(link.name)):
                self._runs[run].lost(link.name, why)
            self._follow(self._admission.agent_lost(link.name))

    def lose_agent(self, agent: str, why: str) -> None:
        """The agent is gone, and so is its connection, whichever that is now."""
        if (link := self.links.get(agent)) is not None:
            self.lose(link, why)

    def ping(self, limit: int, silence_s: float) -> None:
        """Send a ping to each agent; one that left `limit` of them unanswered (a stopped process, a dead network, no
        connection) is lost."""
        for link in [link for link in self.links.values() if link.unanswered_pings >= limit]:
            self.lose(link, f"it was silent for {silence_s:g} s: {limit} pings were not answered")
            self._engine.kill(link.name)
        message = encode_body(m.Ping())
        for link in self.links.values():
            link.ping(message)

    def tell_waiting(self) -> None:
        """Tell runs that wait only because others have the places that it is so: their patience is for agents."""
        waiting = self._admission.waiting
        offers = self._offers() if waiting else []
        for gang in waiting:
            if capacity(gang, offers) >= gang.needed:
                self._runs[gang.run].must_wait()

    def statuses(self) -> list[AgentStatus]:
        """Every agent that there is, or that is expected."""
        joined = [
            AgentStatus(
                agent=agent,
                host=self._joined[agent].host,
                phase=AgentPhase.JOINED if drain is None else AgentPhase.DRAINING,
                why=drain.why if drain is not None else "",
                left_s=drain.left_s if drain is not None else None,
            )
            for agent, drain in ((agent, self._draining.get(agent)) for agent in self.links)
        ]
        return joined + [AgentStatus(agent=agent, phase=AgentPhase.PENDING) for agent in self._pending]

    def waiting_for(self, run: RunAgents) -> str:
        """What keeps the run from its places, as a phrase for people; "" if it has them."""
        missing = self._admission.missing(run.id)
        if not missing:
            return ""
        room = capacity(run.gang, self._offers())
        if room >= run.gang.needed:
            why = "other runs have the places"
        elif self._pending:
            why = f"{count_text(len(self._pending), 'agent')} being started"
        elif not self.links:
            why = "no agent has joined"
        else:
            why = f"{count_text(len(self.links), 'agent')} joined, with room for {room}"
            if run.gang.strategy.is_strict:
                why = f"{why} ({run.gang.strategy.value})"
        return f"{missing} of {count_text(run.gang.needed, 'worker')}: {why}"

    def _offers(self) -> list[Offer]:
        """What agents have that are not taken away."""
        return [_offer(self._joined[agent]) for agent in self.links if agent not in self._draining]

    def drain(self, agent: str, why: str, deadline_s: float | None = None) -> None:
        """Take all runs off an agent, as soon as each can go on elsewhere. Of two deadlines the earlier one counts."""
        if agent not in self.links:
            return
        before = self._draining.get(agent)
        if before is not None:
            left_s = before.left_s
            if deadline_s is None or (left_s is not None and left_s <= deadline_s):
                return
        deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        self._draining[agent] = _Drain(why, deadline)
        self._engine.abandon(agent)  # another one has to take its place
        holders = list(self._admission.holders(agent))
        self._follow(self._admission.drain(agent))
        for run in map(self._runs.__getitem__, holders):
            run.drain(agent, why, deadline_s)
            if self._admission.would_take_more(run.id):
                self.request(run)

    def set_aside(self, host: str, why: str, duration_s: float, run: RunAgents) -> None:
        """Drain the agents of a host, and of this name later, for a time; not if there is no room without them for as
        many workers as the run needs."""
        others = [agent for agent in self.links if agent not in self._draining and self._joined[agent].host != host]
        if capacity(run.gang, [_offer(self._joined[agent]) for agent in others]) < run.gang.needed:
            return
        self._set_aside[host] = _Drain(why, asyncio.get_running_loop().time() + duration_s)
        for link in [link for link in self.links.values() if self._joined[link.name].host == host]:
            self.drain(link.name, why)
            self._readmit_later(link)

    def _readmit_later(self, link: AgentLink) -> None:
        left_s = self._set_aside[self._joined[link.name].host].left_s
        asyncio.get_running_loop().call_later(max(left_s or 0.0, _READMIT_S), self._readmit, link)

    def _readmit(self, link: AgentLink) -> None:
        """The agent's host is set aside no longer: it gets workers again, once those have left that it had."""
        aside, drain = self._set_aside.get(self._joined[link.name].host), self._draining.get(link.name)
        if self.links.get(link.name) is not link or aside is None or drain is None or drain.why != aside.why:
            return  # it is gone, or is drained for another reason
        if aside.left_s or self._admission.holders(link.name):
            self._readmit_later(link)
            return
        del self._draining[link.name]
        self._follow(self._admission.agent_joined(link.name, _offer(self._joined[link.name])))

    def _let_leave(self, agent: str) -> None:
        """End an agent that is about to be taken away, if no run has anything there."""
        if agent in self._leaving and not self._admission.holders(agent):
            self.links[agent].send(m.Shutdown(flush_s=0.0))

    def drain_node(self, node: str, why: str, deadline_s: float | None, run: RunAgents) -> str:
        """Drain the agents of this name or on this host; gives a sentence for a client that asks about `run`, or "" if
        there is none."""
        agents = [agent for agent in self.links if node in (agent, self._joined[agent].host)]
        for agent in agents:
            self.drain(agent, why, deadline_s)
        if not agents:
            return ""
        text = f"{node} gets no new workers."
        if not set(agents) & run.links.keys():
            return text
        if missing := self.waiting_for(run):
            return f"{text} Those of this run stay until there is room elsewhere; it waits for {missing}."
        return f"{text} Those of this run move elsewhere after the next checkpoint."

    def forgive(self) -> None:
        """Forget unanswered pings, since this process itself stood still and could not read the answers."""
        self._stood_still_at = asyncio.get_running_loop().time()
        for link in self.links.values():
            link.unanswered_pings = 0

    async def close(self, flush_s: float) -> None:
        """End the agents; each may take `flush_s`."""
        self.is_closed = True
        send_all(self.links.values(), m.Shutdown(flush_s=flush_s))
        await self._engine.close(flush_s)

    def _agent_changed(self, change: AgentChange) -> None:
        """What the engine says of an agent."""
        if change.phase is AgentPhase.PENDING:
            self._pending[change.agent] = None
        elif change.phase is AgentPhase.DRAINING:
            self.drain(change.agent, change.why, change.deadline_s)
        elif change.phase is AgentPhase.GONE:
            self._pending.pop(change.agent, None)
            self._process_gone(change.agent, change.why)

    def _process_gone(self, agent: str, why: str) -> None:
        """The agent's process has ended: what its closed connection may have told already, or will."""
        self.lose_agent(agent, why)
        waiting = [self._runs[gang.run] for gang in self._admission.waiting]
        for run in waiting:
            joined = self._joined.get(agent)
            mismatch = find_torch_mismatch(agent, joined.torch, run.gang.torch) if joined is not None else why
            if mismatch is not None:
                run.unavailable(mismatch)
            elif run.waits:
                self.request(run)  # the engine may have counted on this one


def _offer(joined: e.AgentJoined) -> Offer:
    return Offer(resources=joined.resources, gpus=joined.gpus, slots=joined.slots or None, torch=joined.torch)


def _is_of(agent: str, message: m.AgentMessage) -> bool:
    """Whether a message is about the agent that sent it, or about its workers: it may change no other agent's state."""
    match message:
        case (
            e.AgentDraining(agent=named)
            | e.AgentPrepared(agent=named)
            | e.WorkersStarted(agent=named)
            | e.DamageFound(agent=named)
            | e.WorkersStopped(agent=named)
        ):
            if named != agent:
                _log.warning("The connection of agent %s is closed: it sent a message of agent %s.", agent, named)
            return named == agent
        case _:
            return True

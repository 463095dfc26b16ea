"""The connected agents of this process: accepting them, and noticing when one is gone.

Each agent belongs to the run that it was started for; what it sends goes to that run's `RunAgents`, and to no other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from holdfast.control.agent_link import AgentLink
from holdfast.control.run_agents import RunAgents
from holdfast.core import events as e
from holdfast.runtime import current
from holdfast.wire import messages as m
from holdfast.wire.channel import Channel

__all__ = ["AgentPool"]

_log = logging.getLogger(__name__)
_LAST_WORD_S = 1.0
"""A dying process closes its connection before the kernel says that it is dead: on a busy machine, long before."""


class AgentPool:
    """Every agent by name. Used from the hub's event loop only."""

    def __init__(self) -> None:
        self.links: dict[str, AgentLink] = {}
        self._runs: dict[str, RunAgents] = {}
        """The run that each agent was started for, as long as that run lasts."""
        self._numbers = itertools.count()

    def add(self, run: RunAgents) -> str:
        """A name for a new agent of this run."""
        agent = f"agent-{current().pid()}-{next(self._numbers)}"
        self._runs[agent] = run
        return agent

    def forget(self, agents: Iterable[str]) -> None:
        """The run of these agents is over, or they could not be started."""
        for agent in agents:
            self.lose_agent(agent, "its run is over")
            self._runs.pop(agent, None)

    async def serve(self, channel: Channel[m.AgentMessage]) -> None:
        """One agent's connection, from its `AgentJoined` to its end."""
        first = await channel.recv()
        joined = None if first is None else first.message
        run = self._runs.get(channel.agent)
        if run is None or not isinstance(joined, e.AgentJoined) or joined.agent != channel.agent:
            return
        link = AgentLink(channel, channel.agent)
        # The end of its former connection may be noticed long after the agent has connected again.
        self.lose_agent(link.name, "it connected anew")
        self.links[link.name] = link
        run.joined(link, joined)
        sending = asyncio.ensure_future(link.prepare(run.id, run.preparation))
        try:
            while (envelope := await channel.recv()) is not None and _is_of(link.name, envelope.message):
                link.unanswered_pings = 0
                if envelope.run == run.id and self.links.get(link.name) is link:
                    run.receive(envelope.message)
            with suppress(TimeoutError):  # where the engine knows how it died, it says so soon
                async with asyncio.timeout(_LAST_WORD_S):
                    await link.gone.wait()
        finally:
            sending.cancel()
            self.lose(link, "its connection closed")

    def lose(self, link: AgentLink, why: str) -> None:
        """End one connection. The agent is lost with it, unless another connection has taken its place."""
        link.gone.set()
        link.abort()
        if self.links.get(link.name) is link:
            del self.links[link.name]
            self._runs[link.name].lost(link.name, why)

    def lose_agent(self, agent: str, why: str) -> None:
        """The agent is gone, and so is its connection, whichever that is now."""
        if (link := self.links.get(agent)) is not None:
            self.lose(link, why)

    def process_gone(self, agent: str, why: str) -> None:
        """The agent's process has ended: what its closed connection may have told already, or will."""
        self.lose_agent(agent, why)
        if (run := self._runs.get(agent)) is not None:
            run.process_gone(agent, why)

    async def watch(self, silence_s: float, interval_s: float, look: Callable[[], None]) -> None:
        """Send pings; an agent that leaves `silence_s` worth of them unanswered (a stopped process, a dead network) is
        lost. `look` is called before each round: it notices when this process itself stood still (`forgive`)."""
        limit = max(2, round(silence_s / interval_s))
        while True:
            await asyncio.sleep(interval_s)
            look()
            for link in list(self.links.values()):
                if link.unanswered_pings >= limit:
                    self.lose(link, f"it was silent for {silence_s:g} s: {limit} pings were not answered")
                    self._runs[link.name].kill(link.name)
                else:
                    link.unanswered_pings += 1
                    link.send(m.Ping())

    def forgive(self) -> None:
        """Forget unanswered pings, since this process itself stood still and could not read the answers."""
        for link in self.links.values():
            link.unanswered_pings = 0


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

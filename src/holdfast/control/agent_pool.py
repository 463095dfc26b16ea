"""The connected agents: accepting them, sending to them, and noticing when one is gone.

What an agent sends is an event of the core, which is posted as it is, or an answer to an upload, output, or a
collective, which goes to whoever handles that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from holdfast.control.agent_link import AgentLink
from holdfast.control.collectives import Answer, Collectives
from holdfast.control.publisher import Publisher
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.engines.engine import Engine
from holdfast.wire import messages as m
from holdfast.wire.channel import Channel

__all__ = ["OnUpload", "AgentPool"]

_log = logging.getLogger(__name__)
_LAST_WORD_S = 1.0
"""A dying process closes its connection before the kernel says that it is dead: on a busy machine, long before."""

OnUpload = Callable[[m.Uploaded | m.UploadFailed], None]


class AgentPool:
    """Every connected agent by name. Used from the controller's event loop only."""

    def __init__(
        self,
        prepare: m.Prepare,
        post: Callable[[e.Event], None],
        publisher: Publisher,
        answer: Answer,
    ) -> None:
        self.links: dict[str, AgentLink] = {}
        self.met: set[str] = set()
        """Every agent that ever joined."""
        self.on_upload: OnUpload | None = None
        """Told of the answers to `Upload`; the persister's."""
        self._prepare = prepare
        self._post = post
        self._publisher = publisher
        self._collectives = Collectives(answer)

    async def serve(self, channel: Channel[m.AgentMessage]) -> None:
        """One agent's connection, from its `AgentJoined` to its end."""
        joined = await channel.recv()
        if not isinstance(joined, e.AgentJoined) or joined.agent != channel.agent:
            return
        link = AgentLink(channel, channel.agent)
        if (former := self.links.get(link.name)) is not None:
            # The end of that one may be noticed long after the agent has connected again.
            self.lose(former, "it connected anew")
        self.links[link.name] = link
        self.met.add(link.name)
        self._post(joined)
        sending = asyncio.ensure_future(link.send_job(self._prepare))
        try:
            while (message := await channel.recv()) is not None and _is_of(link.name, message):
                link.unanswered_pings = 0
                self.receive(message)
            with suppress(TimeoutError):  # where the engine knows how it died, it says so soon
                async with asyncio.timeout(_LAST_WORD_S):
                    await link.gone.wait()
        finally:
            sending.cancel()
            self.lose(link, "its connection closed")

    def send(self, agents: Sequence[str], message: m.ControllerMessage) -> None:
        """Send one message to these agents; not to those that are lost, of which the core is about to be told."""
        for agent in agents:
            if (link := self.links.get(agent)) is not None:
                link.send(message)

    def start_workers(self, command: c.StartWorkers) -> None:
        """Send each agent the command with its own place."""
        self._collectives.begin(command.generation, command.world_size)
        for place in command.places:
            self.send([place.agent], msgspec.structs.replace(command, places=(place,)))

    def send_command(self, command: c.StopWorkers | c.AnnounceCheckpoint | c.AnnounceSettled) -> None:
        """Send a command to the agents that it names."""
        self.send(command.agents, msgspec.structs.replace(command, agents=()))

    def lose(self, link: AgentLink, why: str) -> None:
        """End one connection. The agent is lost with it, unless another connection has taken its place."""
        link.gone.set()
        link.abort()
        if self.links.get(link.name) is link:
            del self.links[link.name]
            self._post(e.AgentLost(agent=link.name, why=why))

    def lose_agent(self, agent: str, why: str) -> None:
        """The agent's process is gone, and so is its connection, whichever that is now."""
        if (link := self.links.get(agent)) is not None:
            self.lose(link, why)

    async def watch(self, engine: Engine, silence_s: float, interval_s: float, look: Callable[[], None]) -> None:
        """Send pings; an agent that leaves `silence_s` worth of them unanswered (a stopped process, a dead network) is
        lost. `look` is called before each round: it notices when this process itself stood still (`forgive`)."""
        limit = max(2, round(silence_s / interval_s))
        while True:
            await asyncio.sleep(interval_s)
            look()
            for link in list(self.links.values()):
                if link.unanswered_pings >= limit:
                    self.lose(link, f"it was silent for {silence_s:g} s: {limit} pings were not answered")
                    engine.kill(link.name)
                else:
                    link.unanswered_pings += 1
                    link.send(m.Ping())

    def forgive(self) -> None:
        """Forget unanswered pings, since this process itself stood still and could not read the answers."""
        for link in self.links.values():
            link.unanswered_pings = 0

    def receive(self, message: m.AgentMessage) -> None:
        """Handle one message of a connected agent."""
        match message:
            case m.Uploaded() | m.UploadFailed():
                if self.on_upload is not None:
                    self.on_upload(message)
            case m.Logs(generation=generation, lines=lines):
                self._publisher.logs(generation, lines)
            case m.Stacks(generation=generation, rank=rank, text=text):
                self._publisher.logs(generation, [m.LogLine(rank, "stderr", line) for line in text.splitlines()])
            case m.Collect():
                answer = self._collectives.arrive(message)
                if answer is not None:
                    self.send(list(self.links), answer)
            case m.Pong() | e.AgentJoined():
                return
            case _:
                self._post(message)


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

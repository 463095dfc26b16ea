"""The agents that are here: taking them in, talking to them, and noticing when one is gone.

`agent_link` says what a message means as an event; what is no event (uploads, output, collectives) is passed on from
here to whoever waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from holdfast.control.agent_link import AgentLink, translate
from holdfast.control.collectives import Answer, Collectives
from holdfast.control.publisher import Publisher
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.state import Durable
from holdfast.engines.engine import Engine
from holdfast.wire import messages as m
from holdfast.wire.channel import Channel

__all__ = ["OnUpload", "AgentPool"]

_LAST_WORD_S = 1.0
"""A dying process closes its connection before the kernel says that it is dead: on a busy machine, long before."""

OnUpload = Callable[[m.Uploaded | m.UploadFailed], None]


class AgentPool:
    """Every connected agent by name. Used from the controller's event loop only."""

    def __init__(
        self,
        prepare: m.Prepare,
        epoch: int,
        post: Callable[[e.Event], None],
        publisher: Publisher,
        answer: Answer,
    ) -> None:
        self.links: dict[str, AgentLink] = {}
        self.met: set[str] = set()
        """Every agent that ever said hello."""
        self.on_upload: OnUpload | None = None
        """Told of the answers to `Upload`; the persister's."""
        self._prepare = prepare
        self._epoch = epoch
        self._post = post
        self._publisher = publisher
        self._collectives = Collectives(answer)

    async def serve(self, channel: Channel[m.AgentMessage]) -> None:
        """One agent's connection, from its hello to its end."""
        hello = await channel.recv()
        if not isinstance(hello, m.AgentHello):
            return
        link = AgentLink(channel, hello)
        if (former := self.links.get(link.name)) is not None:
            # The end of that one may be noticed long after the agent has connected again.
            self.lose(former, "it connected anew")
        self.links[link.name] = link
        self.met.add(link.name)
        link.send(m.Welcome(protocol=m.PROTOCOL, run=self._prepare.experiment, epoch=self._epoch))
        self._post(e.AgentJoined(agent=link.name, host=link.host, slots=link.slots))
        sending = asyncio.ensure_future(link.send_job(self._prepare))
        try:
            while (message := await channel.recv()) is not None:
                link.unanswered_pings = 0
                self._take(message, link)
            with suppress(TimeoutError):  # where the engine knows how it died, it says so soon
                async with asyncio.timeout(_LAST_WORD_S):
                    await link.gone.wait()
        finally:
            sending.cancel()
            self.lose(link, "its connection closed")

    def send(self, agents: Sequence[str], message: m.ControllerMessage) -> None:
        """Those that are gone do not hear it; their loss is on its way to the core."""
        for agent in agents:
            if (link := self.links.get(agent)) is not None:
                link.send(message)

    def start(self, command: c.StartWorkers, durable: Durable, max_restarts: int) -> None:
        """Tell each agent its share of a generation."""
        self._collectives.begin(command.generation, command.world_size)
        first = self.links.get(command.places[0].agent)
        checkpoints = durable.resumable()
        for place in command.places:
            link = self.links.get(place.agent)
            if link is None or first is None:
                continue  # its loss is on its way to the core
            link.send(
                m.Start(
                    generation=command.generation,
                    ranks=list(place.ranks),
                    world_size=command.world_size,
                    local_world_size=len(place.ranks),
                    node_rank=place.node_rank,
                    node_count=len(command.places),
                    master_address=first.address,
                    master_port=first.master_port,
                    restart_count=command.restart_count,
                    max_restarts=max_restarts,
                    checkpoint=command.checkpoint,
                    checkpoints=[(stored.name, stored.metrics) for stored in checkpoints],
                    iteration=command.iteration,
                )
            )

    def lose(self, link: AgentLink, why: str) -> None:
        """End one connection. The agent is lost with it, unless another connection has taken its place."""
        link.gone.set()
        link.cut()
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
        """This process stood still: what was not heard meanwhile is nobody's silence."""
        for link in self.links.values():
            link.unanswered_pings = 0

    def _take(self, message: m.AgentMessage, link: AgentLink) -> None:
        event = translate(message, link)
        if event is not None:
            if isinstance(message, m.Stopped):
                link.master_port = message.master_port
            self._post(event)
            return
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
            case _:
                return

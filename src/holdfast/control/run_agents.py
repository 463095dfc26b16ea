"""One run's agents: what a controller asks of them, and what they send to it.

`agent_pool` has the connections of all runs of the process; this is one run's part of it. What an agent sends is an
event of the core, which is posted as it is, or an answer to an upload, output, or a collective, which goes to whoever
handles that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.control.agent_link import AgentLink, Preparation
from holdfast.control.collectives import Answer, Collectives
from holdfast.control.publisher import Publisher
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.engines.engine import Engine
from holdfast.wire import messages as m

if TYPE_CHECKING:
    from holdfast.control.agent_pool import AgentPool

__all__ = ["OnUpload", "RunAgents"]

OnUpload = Callable[[m.Uploaded | m.UploadFailed], None]


class RunAgents:
    """The agents of one run. Used from the hub's event loop only."""

    def __init__(
        self,
        pool: AgentPool,
        engine: Engine,
        run: str,
        preparation: Preparation,
        workers_per_agent: int,
        post: Callable[[e.Event], None],
        publisher: Publisher,
        answer: Answer,
    ) -> None:
        self.links: dict[str, AgentLink] = {}
        self.on_upload: OnUpload | None = None
        """Told of the answers to `Upload`; the persister's."""
        self.id = run
        """The run's, under which its messages go."""
        self.preparation = preparation
        self._pool = pool
        self._engine = engine
        self._workers_per_agent = workers_per_agent
        self._post = post
        self._publisher = publisher
        self._collectives = Collectives(answer)
        self._started: dict[str, int] = {}
        """The slots of every agent that was started for this run."""
        self._met: set[str] = set()
        self._is_closing = False

    # ------------------------------------------------------------ what the controller asks

    def request(self, slots: int) -> None:
        """Have agents with so many more slots in all; those that cannot be started are reported as such."""
        while slots > 0:
            share = min(slots, self._workers_per_agent)
            slots -= share
            agent = self._pool.add(self)
            self._started[agent] = share
            try:
                self._engine.start(agent, share)
            except OSError as error:
                self._pool.forget([agent])
                self._post(e.AgentUnavailable(slots=share, why=str(error)))

    def send(self, agents: Sequence[str], message: m.ControllerMessage) -> None:
        """Send one message to these agents; not to those that are lost, of which the core is about to be told."""
        for agent in agents:
            if (link := self.links.get(agent)) is not None:
                link.send(message, self.id)

    def start_workers(self, command: c.StartWorkers) -> None:
        """Send each agent the command with its own place."""
        self._collectives.begin(command.generation, command.world_size)
        for place in command.places:
            self.send([place.agent], msgspec.structs.replace(command, places=(place,)))

    def send_command(self, command: c.StopWorkers | c.AnnounceCheckpoint | c.AnnounceSettled) -> None:
        """Send a command to the agents that it names."""
        self.send(command.agents, msgspec.structs.replace(command, agents=()))

    def kill(self, *agents: str) -> None:
        """Kill these agents, or all of the run's, whatever they are doing."""
        for agent in agents or self._met:
            self._engine.kill(agent)

    async def close(self, flush_s: float) -> None:
        """End the run's agents; each may take `flush_s` to store logs and artifacts."""
        self._is_closing = True
        for link in self.links.values():
            link.send(m.Shutdown(flush_s=flush_s))
        await self._engine.wait_ended(list(self._started), flush_s)
        self._pool.forget(self._started)

    # ------------------------------------------------------------ what the pool tells

    def joined(self, link: AgentLink, event: e.AgentJoined) -> None:
        self.links[link.name] = link
        self._met.add(link.name)
        self._post(event)

    def lost(self, agent: str, why: str) -> None:
        del self.links[agent]
        self._post(e.AgentLost(agent=agent, why=why))

    def process_gone(self, agent: str, why: str) -> None:
        """The process of an agent has ended, and no connection of it is left."""
        if agent not in self._met and not self._is_closing:
            self._post(e.AgentUnavailable(slots=self._started[agent], why=why))

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
            case m.Pong() | m.RunClosed() | e.AgentJoined():
                return
            case _:
                self._post(message)

"""One run's agents: what a controller asks of them, and what they send to it.

`agent_pool` has the agents of all runs of the process; this is one run's part of it: the agents on which it was given
places. What an agent sends is an event of the core, which is posted as it is, or an answer to an upload, output, or a
collective, which goes to whoever handles that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.control.agent_link import AgentLink, Preparation, send_all
from holdfast.control.collectives import Answer, Collectives
from holdfast.control.publisher import Publisher
from holdfast.control.storage_servers import StorageServers
from holdfast.core import commands as c
from holdfast.core import events as e
from holdfast.core.admission import Gang
from holdfast.core.resources import Taken
from holdfast.views.formatting import count_text
from holdfast.wire import messages as m
from holdfast.wire.control_messages import AgentStatus

if TYPE_CHECKING:
    from holdfast.control.agent_pool import AgentPool

__all__ = ["OnUpload", "RunAgents"]

_GRACE_S = 3.0
"""How long an agent may take to end its part of a run, besides the time for storing logs and artifacts."""
_LOOK_S = 1.0
_log = logging.getLogger(__name__)

OnUpload = Callable[[m.Uploaded | m.UploadFailed], None]


class RunAgents:
    """The agents on which one run has places. Used from the hub's event loop only."""

    def __init__(
        self,
        pool: AgentPool,
        gang: Gang,
        preparation: Preparation,
        post: Callable[[e.Event], None],
        publisher: Publisher,
        answer: Answer,
        storage_servers: StorageServers | None = None,
    ) -> None:
        self._storage_servers = storage_servers
        self.links: dict[str, AgentLink] = {}
        self.on_upload: OnUpload | None = None
        """Told of the answers to `Upload`; the persister's."""
        self.on_decision: Callable[[m.Collected], None] | None = None
        """Given what to answer when all ranks wait for the decision whether the run goes on."""
        self.gang = gang
        self._pool = pool
        self._preparation = preparation
        self._post = post
        self._publisher = publisher
        self._collectives = Collectives(answer)
        self._wanted = 0
        """Slots that the core asked for and has not got."""
        self._taken: dict[str, tuple[Taken, ...]] = {}
        """What each worker has on each agent."""
        self._prepared: dict[str, e.AgentPrepared] = {}
        self._sending: dict[str, asyncio.Task[None] | None] = {}
        """How each agent is being prepared; None: all was sent at once."""
        self._revoked: dict[str, str] = {}
        """Agents whose places have to be given up, each with the reason."""
        self._giving_up: set[str] = set()
        self._unseen_losses: list[str] = []
        """Agents of whose loss the core has not been told yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._left = asyncio.Event()
        """Set whenever an agent has let go of the run."""
        self._hurried = False
        self.waiting_for = ""
        """What keeps the run from starting workers, as a phrase for people; "" if nothing does, or not for long. May be
        read from other threads."""
        self.on_waiting: Callable[[], None] = lambda: None
        """Called when the run begins to wait for something."""
        self._looking: asyncio.TimerHandle | None = None
        pool.enter(self)

    @property
    def id(self) -> str:
        """The run's, under which its messages go."""
        return self.gang.run

    # ------------------------------------------------------------ what the controller asks

    def request(self, slots: int) -> None:
        """Have places for so many more workers; where no agent can be started, that is reported."""
        self._wanted += slots
        self._pool.request(self)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def change_bounds(self, workers_min: int, workers_max: int) -> None:
        """The run needs and takes other numbers of workers."""
        self.gang = self.gang.with_bounds(workers_min, workers_max)
        self._wanted = min(self._wanted, workers_max)
        self._pool.resize(self)

    def release_places(self, command: c.ReleasePlaces) -> None:
        """Give places back that the run needs no longer; not if it has been given others there meanwhile."""
        agent, taken = command.agent, self._taken.get(command.agent, ())
        if len(taken) != command.held or agent in self._revoked:
            return
        if command.keep:
            self._taken[agent] = taken[: command.keep]
            self._pool.give_back(self, agent, len(taken) - command.keep)
        else:
            self._revoked[agent] = "the run needs it no longer"
            self._pool.leave_agent(self, agent)

    def send(self, agents: Sequence[str], message: m.ControllerMessage) -> None:
        """Send one message to these agents; not to those that are lost, of which the core is about to be told."""
        send_all([self.links[agent] for agent in agents if agent in self.links], message, self.id)

    def start_workers(self, command: c.StartWorkers) -> None:
        """Send each agent the command with its own place."""
        self._look_no_more()
        self._collectives.begin(command.generation, command.world_size)
        for place in command.places:
            taken = self._taken.get(place.agent, ())[: len(place.ranks)]
            if any(one.gpus for one in taken):
                place = msgspec.structs.replace(place, gpus=tuple(one.gpus for one in taken))
            self.send([place.agent], msgspec.structs.replace(command, places=(place,)))

    def send_command(
        self,
        command: c.StopWorkers | c.HoldReports | c.AnnounceCheckpoint | c.AnnounceSettled | c.AnnouncePreemption,
    ) -> None:
        """Send a command to the agents that it names."""
        self.send(command.agents, msgspec.structs.replace(command, agents=()))

    def drain_node(self, node: str, why: str, deadline_s: float | None) -> str:
        """Drain the agents of this name or on this host; gives a sentence, or "" if there is none."""
        return self._pool.drain_node(node, why, deadline_s, self)

    def set_aside(self, command: c.SetHostAside) -> None:
        """Take all runs off a host for a time, if this run has room without it."""
        self._pool.set_aside(command.host, command.why, command.duration_s, self)
        self._post(e.SetAsideAnswered(host=command.host))

    def statuses(self, ranks: Mapping[str, tuple[int, ...]], spares: Collection[str]) -> tuple[AgentStatus, ...]:
        """The agents that the run may get places on, each with its ranks there; `spares` are kept idle."""
        return tuple(
            msgspec.structs.replace(one, ranks=ranks.get(one.agent, ()), spare=one.agent in spares)
            for one in self._pool.statuses()
        )

    def answer(self, answer: m.Collected) -> None:
        """Send what a collective came to."""
        self.send(list(self.links), answer)

    def hurry(self) -> None:
        """Wait no longer for agents that store logs and artifacts of the run: kill those that serve no other run."""
        self._hurried = True
        self._left.set()
        for agent in self.links:
            self._pool.kill(agent, self)

    async def close(self, flush_s: float) -> None:
        """Have nothing of the run left on its agents; each may take `flush_s` to store its logs and artifacts."""
        self._look_no_more()
        self._is_closing = True
        self._pool.withdraw(self)
        self.send(list(self.links), m.CloseRun(flush_s=flush_s))
        try:
            async with asyncio.timeout(flush_s + _GRACE_S):
                while self.links and not self._hurried:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            for agent in list(self.links):
                _log.warning("Agent %s did not end its part of the run in time.", agent)
                self._pool.kill(agent, self)
        for agent in list(self.links):
            self._drop(agent)
        await self._pool.leave(self, flush_s)

    def _look(self) -> None:
        """Find out what is waited for, now and again until workers are started."""
        unprepared = len(self.links.keys() - self._prepared.keys())
        found = self._pool.waiting_for(self)
        if not found and unprepared:
            found = f"{count_text(unprepared, 'agent')} to import the training function"
        # At once: who reads "" in between, in another thread, sleeps until it is woken.
        before, self.waiting_for = self.waiting_for, found
        if found and not before:
            self.on_waiting()
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look_no_more(self) -> None:
        self.waiting_for = ""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    # ------------------------------------------------------------ what the pool tells

    def granted(self, link: AgentLink, joined: e.AgentJoined, workers: Sequence[Taken]) -> None:
        """The run has places for these workers on the agent, besides those that it may have there."""
        agent = link.name
        self.links[agent] = link
        self._taken[agent] = (*self._taken.get(agent, ()), *workers)
        self._wanted = max(0, self._wanted - len(workers))
        self._post(msgspec.structs.replace(joined, slots=len(self._taken[agent])))
        if agent not in self._sending:
            self._sending[agent] = link.prepare(self.id, self._preparation)
        elif agent in self._prepared:
            self._post(self._prepared[agent])

    def revoke(self, agent: str) -> None:
        """The run, which waits for more, has to give its places on this agent up, as soon as it needs nothing there."""
        self._revoked[agent] = "its places were given to a run that came earlier"
        self._post(e.PlacesTaken())

    def drain(self, agent: str, why: str, deadline_s: float | None) -> None:
        """The agent is to be taken away: the run gives its places there up, as soon as it needs nothing there."""
        if agent in self.links:
            self._revoked[agent] = f"it was drained: {why}"
            self._post(e.AgentDraining(agent=agent, why=why, deadline_s=deadline_s))

    @property
    def must_give_up(self) -> bool:
        """Whether there are places that `give_up_revoked` has not given up."""
        return len(self._revoked) > len(self._giving_up)

    def give_up_revoked(self, in_use: Collection[str]) -> None:
        """Give up what has to be, but on agents that have workers, or parts of checkpoints on their way."""
        for agent in sorted(self._revoked.keys() - self._giving_up - set(in_use)):
            self._giving_up.add(agent)
            self.send([agent], m.CloseRun(flush_s=_GRACE_S))

    def lost(self, agent: str, why: str) -> None:
        """The agent is gone, whether or not the run has places there."""
        if agent in self.links:
            self._drop(agent)
            self._unseen_losses.append(agent)
            self._post(e.AgentLost(agent=agent, why=why))

    def saw_loss(self, agent: str) -> None:
        """The core has been told that the agent is lost: what it decides from here on is for another of that name."""
        if agent in self._unseen_losses:
            self._unseen_losses.remove(agent)

    def may_rejoin(self, agent: str) -> bool:
        """Whether no command for the agent that was lost may still be on its way."""
        return self._is_closing or agent not in self._unseen_losses

    def refused(self, agent: str, why: str) -> None:
        """The agent is there, and the run cannot use it."""
        self._post(e.AgentRefused(agent=agent, why=why))

    def must_wait(self) -> None:
        """Other runs have the places."""
        self._post(e.PlacesTaken())

    @property
    def waits(self) -> bool:
        """Whether the core has asked for places that it has not got."""
        return self._wanted > 0

    def unavailable(self, why: str) -> None:
        """An agent could not be started, and the run waits for one."""
        slots, self._wanted = self._wanted, 0
        self._post(e.AgentUnavailable(slots=slots, why=why))

    def receive(self, agent: str, message: m.AgentMessage) -> None:
        """Handle one message of an agent on which the run has places."""
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
                if answer is None:
                    return
                if message.kind is m.CollectiveKind.DECISION and self.on_decision is not None:
                    self.on_decision(answer)
                else:
                    self.answer(answer)
            case m.StorageUnseen():
                self._spawn(self._serve_storage(agent))
            case m.RunClosed():
                self._closed(agent)
            case m.Pong() | m.OpenChannel() | m.Acknowledge() | m.Leave() | e.AgentJoined() | e.AgentDraining():
                return  # of the agent, not of the run
            case _:
                if isinstance(message, e.AgentPrepared):
                    self._prepared[agent] = message
                self._post(message)

    async def _serve_storage(self, agent: str) -> None:
        """Tell an agent that does not see the run's directory where it is served."""
        probe = self._preparation.run.probe
        if probe is not None and self._storage_servers is not None:
            self.send([agent], await self._storage_servers.serve(probe.root))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _closed(self, agent: str) -> None:
        why = self._revoked.get(agent)
        self._drop(agent)
        if why is not None:
            self._post(e.AgentLost(agent=agent, why=why))
        self._pool.release(self, agent)

    def _drop(self, agent: str) -> None:
        """The run has nothing on the agent any more."""
        del self.links[agent], self._taken[agent]
        if (sending := self._sending.pop(agent)) is not None:
            sending.cancel()
        self._prepared.pop(agent, None)
        self._revoked.pop(agent, None)
        self._giving_up.discard(agent)
        self._left.set()

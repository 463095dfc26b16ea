"""Agents' connections over real sockets: which one counts when an agent connects again under the same name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from holdfast.control import agent_link
from holdfast.control.agent_link import FUNCTION_PIECE_BYTES, AgentLink, Preparation
from holdfast.control.agent_pool import AgentPool
from holdfast.control.publisher import Publisher
from holdfast.control.run_agents import RunAgents
from holdfast.control.working_dir import PackedDirectory
from holdfast.core import events as e
from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase
from holdfast.core.commands import AnnounceCheckpoint
from holdfast.core.events import Ticket
from holdfast.engines.engine import AgentChange, ControllerEndpoint, OnChange
from holdfast.wire.channel import Channel, connect, serve
from holdfast.wire.hello import Hello
from holdfast.wire.messages import (
    AgentMessage,
    CloseRun,
    ControllerMessage,
    FunctionPiece,
    Leave,
    PrepareFunction,
    PrepareRun,
    RunClosed,
)
from holdfast.wire.resumable_channel import ChannelRefusedError, ResumableChannel

_SECRET = "correct horse"
_incarnations = itertools.count()
_PREPARATION = Preparation(
    PrepareFunction(key="f", function=b"", sys_path=[], environment={}),
    PrepareRun(
        function_key="f",
        storage="/nowhere",
        experiment="run",
        trial_id="run",
        trial_dir="/nowhere",
        work_dir="/nowhere",
    ),
)


class _NoEngine:
    """Agents connect by themselves here."""

    def __init__(self) -> None:
        self.wanted: list[list[str]] = []
        """The runs that there had to be room for, each time that something was wanted."""
        self.killed: list[str] = []

    def want(self, gangs: Sequence[Gang]) -> None:
        self.wanted.append([gang.run for gang in gangs])

    def knows(self, agent: str) -> bool:
        return agent == "a"

    def abandon(self, agent: str) -> None: ...

    def kill(self, agent: str) -> None:
        self.killed.append(agent)

    async def close(self, flush_s: float) -> None: ...


class _Controller:
    """An agent pool behind a real server, and the events that it posted."""

    agent = "a"

    def __init__(self) -> None:
        self.is_prompt = True
        """Whether the core is told of losses at once."""
        self.events: list[e.Event] = []
        self.served = asyncio.Queue[None]()
        self.engine = _NoEngine()
        self.pool = AgentPool(self._make_engine, ControllerEndpoint("", ""), 30.0)
        self.run = self.enter("run-1", self.events)
        self.run.request(2)

    def _make_engine(self, endpoint: ControllerEndpoint, on_change: OnChange) -> _NoEngine:
        self.on_change = on_change
        return self.engine

    def enter(
        self, run: str, events: list[e.Event], workers: int = 2, slots_per_worker: int = 1, torch: str = ""
    ) -> RunAgents:
        gang = Gang(run=run, workers=workers, slots_per_worker=slots_per_worker, torch=torch)

        def post(event: e.Event) -> None:
            events.append(event)
            if isinstance(event, e.AgentLost) and self.is_prompt:
                entered.saw_loss(event.agent)

        entered = RunAgents(self.pool, gang, _PREPARATION, post, Publisher([]), lambda kind, data: data)
        return entered

    async def serve(self, channel: Channel[ControllerMessage]) -> None:
        try:
            await self.pool.serve(channel)  # type: ignore[arg-type]
        finally:
            self.served.put_nowait(None)

    async def open(self, address: str, *, comes_back: bool = False) -> ResumableChannel[ControllerMessage]:
        """Connect under the agent's name."""
        channel = ResumableChannel[ControllerMessage](self.agent, str(next(_incarnations)), comes_back=comes_back)
        await channel.join(await connect(address, _SECRET, Hello(agent=self.agent)))
        return channel

    async def join(self, address: str, *, comes_back: bool = False) -> ResumableChannel[ControllerMessage]:
        """Connect as the run's agent, and wait until the controller has answered."""
        channel = await self.open(address, comes_back=comes_back)
        channel.send_nowait(e.AgentJoined(agent=self.agent, host="h", slots=4, address="127.0.0.1"))
        for kind in (PrepareFunction, PrepareRun):
            envelope = await channel.recv()
            assert envelope is not None and isinstance(envelope.message, kind)
        return channel


def _run(test: Callable[[_Controller, str], Awaitable[None]]) -> None:
    async def bounded() -> None:
        controller = _Controller()
        server = await serve("127.0.0.1", 0, _SECRET, controller.serve)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(60):
                await test(controller, f"127.0.0.1:{server.port}")
        finally:
            await server.close()

    asyncio.run(bounded())


async def _is_reachable(controller: _Controller, agent: ResumableChannel[ControllerMessage]) -> bool:
    message = AnnounceCheckpoint(ticket=Ticket(1, 1), name=None)
    controller.run.send([controller.agent], message)
    envelope = await agent.recv()
    return envelope is not None and (envelope.run, envelope.message) == ("run-1", message)


def test_a_second_agent_of_the_same_name_is_refused_while_the_first_is_connected() -> None:
    async def test(controller: _Controller, address: str) -> None:
        first = await controller.join(address, comes_back=True)
        with pytest.raises(ChannelRefusedError, match=r"^An agent named 'a' is connected already, from 127\.0\.0\.1:"):
            await controller.join(address, comes_back=True)
        await controller.served.get()
        assert await _is_reachable(controller, first)
        assert [type(event) for event in controller.events] == [e.AgentJoined]
        await first.close()
        await controller.served.get()

    _run(test)


def test_no_run_learns_of_an_agent_that_comes_back_in_time() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address, comes_back=True)
        for reason in ("noticed by both", "noticed by the agent alone"):
            if reason == "noticed by both":
                agent.disconnect()
                await controller.served.get()
            agent.send_nowait(e.AgentPrepared(agent="a"), "run-1")
            await agent.join(await connect(address, _SECRET, Hello(agent="a")))
            assert await _is_reachable(controller, agent)
        assert [type(event) for event in controller.events] == [e.AgentJoined, e.AgentPrepared, e.AgentPrepared]
        await agent.close()

    _run(test)


def test_an_agent_that_does_not_come_back_is_lost_after_a_while_and_its_channel_is_not_known_any_more() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address, comes_back=True)
        agent.disconnect()
        await controller.served.get()
        for _ in range(4):
            controller.pool.ping(4, 30.0)
        assert [type(event) for event in controller.events] == [e.AgentJoined]
        controller.pool.ping(4, 30.0)
        assert [type(event) for event in controller.events] == [e.AgentJoined, e.AgentLost]
        with pytest.raises(ChannelRefusedError, match="does not know the agent's channel"):
            await agent.join(await connect(address, _SECRET, Hello(agent="a")))
        new = await controller.join(address, comes_back=True)
        assert await _is_reachable(controller, new)
        await new.close()

    _run(test)


def test_an_agent_whose_process_was_killed_is_lost_before_pings_tell() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address, comes_back=True)
        agent.disconnect()  # what the kernel does when a process dies
        began = asyncio.get_running_loop().time()
        while controller.agent in controller.pool.links:
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began >= 0.25, "it had time to connect again"
        lost = controller.events[-1]
        assert isinstance(lost, e.AgentLost) and lost.why.startswith("its process ended")

    _run(test)


@pytest.mark.parametrize("trouble", ["the agent had not answered", "the controller stood still", "it is back"])
def test_a_closed_connection_says_nothing_about_an_agent_when(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    redial_s = 1.0 if trouble == "it is back" else 0.05  # a busy machine takes a while to connect
    monkeypatch.setattr(agent_link, "_REDIAL_S", redial_s)

    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address, comes_back=True)
        if trouble == "the agent had not answered":
            controller.pool.ping(4, 30.0)
            await asyncio.sleep(0.1)  # longer than an answer takes
        agent.disconnect()
        await controller.served.get()
        if trouble == "the controller stood still":
            controller.pool.forgive()
        elif trouble == "it is back":
            await agent.join(await connect(address, _SECRET, Hello(agent="a")))
        await asyncio.sleep(redial_s + 0.25)  # longer than it would take to lose the agent
        assert [type(event) for event in controller.events] == [e.AgentJoined]

    _run(test)


def test_how_an_earlier_connection_ended_says_nothing_about_one_that_the_agent_alone_found_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is closed by the agent's machine, the second is replaced while the controller still reads from it."""
    redial_s = 1.0
    monkeypatch.setattr(agent_link, "_REDIAL_S", redial_s)

    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address, comes_back=True)
        agent.disconnect()
        await controller.served.get()
        await agent.join(await connect(address, _SECRET, Hello(agent="a")))
        assert await _is_reachable(controller, agent)
        first, agent._channel = agent._channel, None  # the controller's end stays open
        await agent.join(await connect(address, _SECRET, Hello(agent="a")))
        assert await _is_reachable(controller, agent)
        await asyncio.sleep(redial_s + 0.25)  # longer than it would take to lose the agent
        assert [type(event) for event in controller.events] == [e.AgentJoined]
        assert await _is_reachable(controller, agent)
        assert first is not None
        first.abort()
        await agent.close()

    _run(test)


def test_an_agent_that_connects_and_does_not_say_what_it_offers_is_killed() -> None:
    """Its network was cut in between, say: the engine must learn that it does not come."""

    async def test(controller: _Controller, address: str) -> None:
        controller.pool._silence_s = 0.05
        agent = await controller.open(address)
        assert await agent.recv() is None
        await controller.served.get()
        assert controller.engine.killed == ["a"] and not controller.pool.links

    _run(test)


def test_what_was_decided_for_a_lost_agent_does_not_reach_the_next_of_its_name() -> None:
    """A command may wait for the journal while its agent is lost and joins again."""

    async def test(controller: _Controller, address: str) -> None:
        first = await controller.join(address, comes_back=True)
        first.disconnect()
        await controller.served.get()
        controller.is_prompt = False
        joining = asyncio.ensure_future(controller.join(address, comes_back=True))
        while not controller.run._unseen_losses:
            await asyncio.sleep(0.001)
        stale = AnnounceCheckpoint(ticket=Ticket(7, 7), name=None)
        controller.run.send([controller.agent], stale)
        assert not joining.done()
        controller.run.saw_loss(controller.agent)
        second = await joining
        assert await _is_reachable(controller, second)
        await second.close()

    _run(test)


def test_an_agent_that_says_that_it_ends_is_lost_at_once() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address, comes_back=True)
        agent.send_nowait(Leave())
        assert await agent.recv() is None
        assert [type(event) for event in controller.events] == [e.AgentJoined, e.AgentLost]

    _run(test)


def test_an_agent_may_reconnect_before_its_loss_is_reported() -> None:
    async def test(controller: _Controller, address: str) -> None:
        old = await controller.join(address)
        await old.close()
        new = await controller.join(address)
        await controller.served.get()
        kinds = [type(event) for event in controller.events]
        assert kinds == [e.AgentJoined, e.AgentLost, e.AgentJoined]
        assert await _is_reachable(controller, new)
        await new.close()
        await controller.served.get()
        assert isinstance(controller.events[-1], e.AgentLost)
        assert controller.pool.links == {}

    _run(test)


def test_an_agent_whose_process_exited_is_lost_with_its_newest_connection() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address)
        controller.pool._process_gone(controller.agent, "its agent was killed by SIGKILL")
        assert await agent.recv() is None
        await agent.close()
        await controller.served.get()
        assert controller.events[1:] == [e.AgentLost(agent=controller.agent, why="its agent was killed by SIGKILL")]

    _run(test)


def test_a_large_function_goes_once_over_the_connection_in_pieces() -> None:
    """Its cost is linear: so many messages as it has pieces, and every byte once."""
    function = bytes(range(256)) * (FUNCTION_PIECE_BYTES * 11 // 2 // 256)
    order = msgspec.structs.replace(_PREPARATION.function, function=function, size_bytes=len(function))

    async def test(controller: _Controller, address: str) -> None:
        controller.run._preparation = Preparation(order, _PREPARATION.run)
        channel = await controller.open(address)
        channel.send_nowait(e.AgentJoined(agent=controller.agent, host="h", slots=2))
        first = await channel.recv()
        assert first is not None and isinstance(first.message, PrepareFunction)
        assert first.message.size_bytes == len(function)
        pieces = [first.message.function]
        for _ in range(5):
            piece = await channel.recv()
            assert piece is not None and isinstance(piece.message, FunctionPiece)
            pieces.append(piece.message.data)
        assert b"".join(pieces) == function
        await channel.close()
        await controller.served.get()

    _run(test)


class _SlowChannel:
    agent = "a"

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.may_send = asyncio.Event()

    async def send(self, message: object, run: str = "") -> None:
        await self.may_send.wait()
        self.messages.append(message)

    def send_nowait(self, message: object, run: str = "") -> None:
        self.messages.append((run, message))


def test_a_run_that_ends_while_its_function_is_sent_does_not_keep_it_from_others() -> None:
    large = msgspec.structs.replace(_PREPARATION.function, function=b"x" * (FUNCTION_PIECE_BYTES + 1))
    preparation = Preparation(large, _PREPARATION.run)

    async def test() -> None:
        channel = _SlowChannel()
        link = AgentLink(cast(ResumableChannel[AgentMessage], channel))
        ending, waiting = link.prepare("run-1", preparation), link.prepare("run-2", preparation)
        assert ending is not None and waiting is not None
        await asyncio.sleep(0)
        ending.cancel()
        channel.may_send.set()
        async with asyncio.timeout(60):
            await waiting
        first = msgspec.structs.replace(large, function=large.function[:FUNCTION_PIECE_BYTES])
        rest = FunctionPiece(key=large.key, data=large.function[FUNCTION_PIECE_BYTES:])
        assert channel.messages == [first, rest, ("run-2", preparation.encoded_run)]
        assert link.prepare("run-3", preparation) is None
        assert channel.messages[3:] == [("run-3", preparation.encoded_run)]

    asyncio.run(test())


def test_a_small_function_and_working_directory_are_sent_at_once_and_once() -> None:
    channel = _SlowChannel()
    link = AgentLink(cast(ResumableChannel[AgentMessage], channel))
    code = PackedDirectory(hash="h", archive=b"archive", root="/root")
    preparation = Preparation(_PREPARATION.function, _PREPARATION.run, code)
    assert link.prepare("run-1", preparation) is None
    assert link.prepare("run-2", preparation) is None
    sent = [(run, msgspec.msgpack.decode(cast(msgspec.Raw, message))) for run, message in cast(Any, channel.messages)]
    assert [(run, message["type"]) for run, message in sent] == [
        ("", "PrepareCode"),
        ("", "CodePiece"),
        ("", "PrepareFunction"),
        ("run-1", "PrepareRun"),
        ("run-2", "PrepareRun"),
    ]


def test_an_agent_joins_under_its_authenticated_name_only() -> None:
    async def test(controller: _Controller, address: str) -> None:
        channel = await controller.open(address)
        channel.send_nowait(e.AgentJoined(agent="b", host="h", slots=2))
        assert await channel.recv() is None
        await channel.close()
        await controller.served.get()
        assert controller.events == []

    _run(test)


def test_two_runs_share_an_agent_and_each_gets_its_own_messages() -> None:
    async def test(controller: _Controller, address: str) -> None:
        others: list[e.Event] = []
        other = controller.enter("run-2", others)
        agent = await controller.join(address)
        other.request(2)
        prepared = await agent.recv()  # the function is there already
        assert prepared is not None and prepared.run == "run-2" and isinstance(prepared.message, PrepareRun)
        agent.send_nowait(e.AgentPrepared(agent="a"), "run-1")
        agent.send_nowait(e.AgentPrepared(agent="a"), "run-3")  # which nobody knows
        await agent.close()
        await controller.served.get()
        assert [type(event) for event in controller.events] == [e.AgentJoined, e.AgentPrepared, e.AgentLost]
        assert [type(event) for event in others] == [e.AgentJoined, e.AgentLost]
        assert isinstance(others[0], e.AgentJoined) and others[0].slots == 2

    _run(test)


def test_a_run_that_ends_leaves_its_places_to_the_next() -> None:
    async def test(controller: _Controller, address: str) -> None:
        others: list[e.Event] = []
        agent = await controller.join(address)
        other = controller.enter("run-2", others, workers=3)
        other.request(3)
        assert controller.engine.wanted[-1] == ["run-1", "run-2"]
        controller.pool.tell_waiting()
        assert others == [e.PlacesTaken()]
        ending = asyncio.ensure_future(controller.run.close(10.0))
        closing = await agent.recv()
        assert closing is not None and (closing.run, closing.message) == ("run-1", CloseRun(flush_s=10.0))
        assert not ending.done() and len(others) == 1
        agent.send_nowait(RunClosed(), "run-1")
        await ending
        assert isinstance(others[1], e.AgentJoined) and others[1].slots == 3
        await agent.close()
        await controller.served.get()

    _run(test)


def test_a_run_that_is_closed_hears_nothing_more() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address)
        ending = asyncio.ensure_future(controller.run.close(10.0))
        await agent.recv()
        agent.send_nowait(RunClosed(), "run-1")
        await ending
        agent.send_nowait(e.AgentPrepared(agent="a"), "run-1")
        await agent.close()
        await controller.served.get()
        assert [type(event) for event in controller.events] == [e.AgentJoined]

    _run(test)


def test_an_agent_that_sends_an_event_of_another_agent_is_lost() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address)
        agent.send_nowait(e.WorkersStopped(generation=1, agent="b"))
        agent.send_nowait(e.AgentPrepared(agent=controller.agent), "run-1")
        assert await agent.recv() is None
        await agent.close()
        await controller.served.get()
        assert [type(event) for event in controller.events] == [e.AgentJoined, e.AgentLost]

    _run(test)


def test_an_agent_announces_its_own_drain_and_of_two_deadlines_the_earlier_one_counts() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address)
        for why, deadline_s in (("SIGTERM", 60.0), ("notice", None), ("later", 90.0), ("SIGTERM again", 5.0)):
            agent.send_nowait(e.AgentDraining(agent=controller.agent, why=why, deadline_s=deadline_s))
        agent.send_nowait(e.AgentPrepared(agent=controller.agent), "run-1")
        while not isinstance(controller.events[-1], e.AgentPrepared):
            await asyncio.sleep(0.01)
        drains = [event for event in controller.events if isinstance(event, e.AgentDraining)]
        assert [(one.why, one.deadline_s) for one in drains] == [("SIGTERM", 60.0), ("SIGTERM again", 5.0)]
        (status,) = controller.pool.statuses()
        assert (status.phase, status.why) == (AgentPhase.DRAINING, "SIGTERM again")
        assert status.left_s is not None and 0 <= status.left_s <= 5
        await agent.close()

    _run(test)


def test_an_agent_cannot_drain_another() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address)
        agent.send_nowait(e.AgentDraining(agent="other", why="SIGTERM"))
        assert await agent.recv() is None
        await agent.close()

    _run(test)


def test_a_worker_without_a_slot_goes_to_a_full_agent_and_no_other_agent_is_wanted() -> None:
    async def test(controller: _Controller, address: str) -> None:
        agent = await controller.join(address)
        controller.enter("run-2", []).request(2)
        waiting: list[e.Event] = []
        controller.enter("run-3", waiting, workers=1).request(1)
        wanted = list(controller.engine.wanted)
        events: list[e.Event] = []
        validation = controller.enter("run-1-validation", events, workers=1, slots_per_worker=0)
        validation.request(1)
        assert [type(event) for event in events] == [e.AgentJoined]
        assert waiting == []
        assert controller.engine.wanted == wanted
        await agent.close()

    _run(test)


def test_what_a_run_waits_for_is_told_from_the_first_request_to_its_places() -> None:
    async def test(controller: _Controller, address: str) -> None:
        pool, run = controller.pool, controller.run
        assert pool.waiting_for(run) == "2 of 2 workers: no agent has joined"
        controller.on_change(AgentChange("a", AgentPhase.PENDING))
        assert pool.waiting_for(run) == "2 of 2 workers: 1 agent being started"
        assert [(one.agent, one.phase) for one in pool.statuses()] == [("a", AgentPhase.PENDING)]
        channel = await controller.join(address)
        assert pool.waiting_for(run) == ""
        assert [(one.agent, one.host, one.phase) for one in pool.statuses()] == [("a", "h", AgentPhase.JOINED)]
        second = controller.enter("run-2", [], workers=4)
        second.request(4)
        assert pool.waiting_for(second) == "4 of 4 workers: other runs have the places"
        third = controller.enter("run-3", [], workers=5)
        third.request(5)
        assert pool.waiting_for(third) == "5 of 5 workers: 1 agent joined, with room for 4"
        await channel.close()

    _run(test)


def test_a_host_is_set_aside_for_a_time_if_the_run_has_room_without_it() -> None:
    async def join(controller: _Controller, address: str, name: str) -> ResumableChannel[ControllerMessage]:
        channel = ResumableChannel[ControllerMessage](name, str(next(_incarnations)))
        await channel.join(await connect(address, _SECRET, Hello(agent=name)))
        channel.send_nowait(e.AgentJoined(agent=name, host=f"host-{name}", slots=2, address="127.0.0.1"))
        while name not in controller.pool.links:
            await asyncio.sleep(0.01)
        return channel

    async def test(controller: _Controller, address: str) -> None:
        pool, run = controller.pool, controller.run
        first = await join(controller, address, "a")
        pool.set_aside("host-a", "it fails", 0.0, run)
        assert [one.phase for one in pool.statuses()] == [AgentPhase.JOINED], "there is no other"
        second = await join(controller, address, "b")
        pool.set_aside("host-a", "it fails", 0.0, run)
        assert [(one.phase, one.why) for one in pool.statuses()] == [
            (AgentPhase.DRAINING, "it fails"),
            (AgentPhase.JOINED, ""),
        ]
        drained = e.AgentDraining(agent="a", why="it fails")
        assert drained in controller.events and set(run.links) == {"a", "b"}
        first.send_nowait(RunClosed(), "run-1")
        while pool.statuses()[0].phase is not AgentPhase.JOINED:
            await asyncio.sleep(0.01)
        await first.close()
        await second.close()

    _run(test)


def test_a_host_is_set_aside_if_the_others_have_room_for_the_smallest_world_of_the_run() -> None:
    async def test(controller: _Controller, address: str) -> None:
        pool = controller.pool
        for name in ("a", "b"):
            controller.agent = name
            channel = await controller.open(address)
            channel.send_nowait(e.AgentJoined(agent=name, host=f"host-{name}", slots=1, address="127.0.0.1"))
            while name not in pool.links:
                await asyncio.sleep(0.01)
        pool.set_aside("host-a", "it fails", 600.0, controller.run)
        assert {one.phase for one in pool.statuses()} == {AgentPhase.JOINED}, "that run needs both"
        controller.run.change_bounds(1, 2)
        pool.set_aside("host-a", "it fails", 600.0, controller.run)
        assert [one.phase for one in pool.statuses()] == [AgentPhase.DRAINING, AgentPhase.JOINED]

    _run(test)


def test_an_agent_that_joins_from_a_host_that_is_set_aside_gets_no_workers() -> None:
    async def test(controller: _Controller, address: str) -> None:
        controller.pool.set_aside("h", "it fails", 600.0, controller.enter("small", [], workers=0))
        channel = await controller.open(address)
        channel.send_nowait(e.AgentJoined(agent=controller.agent, host="h", slots=4, address="127.0.0.1"))
        while not controller.pool.links:
            await asyncio.sleep(0.01)
        assert [one.phase for one in controller.pool.statuses()] == [AgentPhase.DRAINING]
        assert not controller.run.links
        await channel.close()
        await controller.served.get()
        assert not controller.pool.statuses()

    _run(test)


@pytest.mark.parametrize("torch", ["1.13.1", ""])
def test_an_agent_without_the_torch_of_a_run_is_refused_by_it_and_serves_others(torch: str) -> None:
    async def join(controller: _Controller, address: str, name: str, torch: str) -> None:
        controller.agent = name
        channel = await controller.open(address)
        joined = e.AgentJoined(agent=name, host="h", slots=2, address="127.0.0.1", torch=torch)
        channel.send_nowait(joined)
        while name not in controller.pool.links:
            await asyncio.sleep(0.01)

    async def test(controller: _Controller, address: str) -> None:
        before: list[e.Event] = []
        controller.enter("before", before, torch="2.13.0").request(2)
        await join(controller, address, "a", torch)
        (refused,) = before
        assert isinstance(refused, e.AgentRefused) and refused.agent == "a" and "torch" in refused.why
        assert set(controller.run.links) == {"a"}, "the run that needs no torch has it"
        assert not controller.engine.killed
        after: list[e.Event] = []
        controller.enter("after", after, torch="2.13.0").request(2)
        assert after == before, "a run that comes when the agent is there is told the same"
        await join(controller, address, "b", "2.13.9")
        assert [type(one) for one in before] == [e.AgentRefused, e.AgentJoined] and len(after) == 1

    _run(test)


def test_an_engine_that_starts_agents_without_the_torch_of_the_only_run_is_said_to_have_failed() -> None:
    async def test(controller: _Controller, address: str) -> None:
        await controller.run.close(0.0)
        events: list[e.Event] = []
        controller.enter("torch", events, torch="2.13.0").request(2)
        channel = await controller.open(address)
        channel.send_nowait(e.AgentJoined(agent="a", host="h", slots=2, address="127.0.0.1", torch=""))
        while not controller.engine.killed:
            await asyncio.sleep(0.01)
        controller.on_change(AgentChange("a", AgentPhase.GONE, "it was killed"))
        refused, failed = events
        assert isinstance(refused, e.AgentRefused) and isinstance(failed, e.AgentUnavailable)
        assert failed.why == refused.why

    _run(test)

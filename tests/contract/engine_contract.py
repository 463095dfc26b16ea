"""What every engine that starts agents must do, tested with real agents that connect to a real listener.

A subclass says which engine, and runs the tests in `test_<engine>_engine.py`. The simulator's engine and agents that
join by themselves are tested with the hub."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from holdfast.control.agent_pool import AgentPool
from holdfast.core.admission import Gang
from holdfast.core.agent_phase import AgentPhase
from holdfast.engines.engine import AgentChange, ControllerEndpoint, Engine, MakeEngine, OnChange
from holdfast.storage.run_secret import make_secret
from holdfast.wire.channel import serve

__all__ = ["EngineContract", "EngineRig"]

_TIMEOUT_S = 120.0


class EngineRig:
    """An engine in a pool without runs, and what it told."""

    def __init__(self, make_engine: MakeEngine, endpoint: ControllerEndpoint) -> None:
        self.changes: list[AgentChange] = []
        self._make_engine = make_engine
        self.pool = AgentPool(self._make, endpoint, 30.0)

    def _make(self, endpoint: ControllerEndpoint, on_change: OnChange) -> Engine:
        def note(change: AgentChange) -> None:
            self.changes.append(change)
            on_change(change)

        self.engine = self._make_engine(endpoint, note)
        return self.engine

    def want(self, *workers: int) -> None:
        self.engine.want([Gang(run=str(n), workers=one, resources={"CPU": 1.0}) for n, one in enumerate(workers)])

    def names(self, phase: AgentPhase) -> list[str]:
        return [change.agent for change in self.changes if change.phase is phase]

    def pid(self, agent: str) -> int:
        return self.pool._joined[agent].pid

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.02)

    async def joined(self, count: int) -> list[str]:
        """So many agents are connected."""
        await self.until(lambda: len(self.pool.links) == count)
        return list(self.pool.links)


class EngineContract:
    """The tests."""

    def make_engine(self) -> MakeEngine:
        raise NotImplementedError

    @asynccontextmanager
    async def _rig(self) -> AsyncIterator[EngineRig]:
        secret = make_secret()
        pools: list[AgentPool] = []
        listener = await serve("127.0.0.1", 0, secret, lambda one: pools[0].serve(one))  # noqa: PLW0108  it is made below
        rig = EngineRig(self.make_engine(), ControllerEndpoint(f"127.0.0.1:{listener.port}", secret))
        pools.append(rig.pool)
        try:
            yield rig
        finally:
            await rig.pool.close(5.0)
            await listener.close()

    def _run(self, test: Callable[[EngineRig], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(_TIMEOUT_S), self._rig() as rig:
                await test(rig)

        asyncio.run(main())

    def test_an_agent_is_pending_then_connects_and_is_known_until_it_ends_with_the_engine(self) -> None:
        rigs: list[EngineRig] = []

        async def test(rig: EngineRig) -> None:
            rigs.append(rig)
            rig.want(2)
            (agent,) = await rig.joined(1)
            assert rig.changes == [AgentChange(agent, AgentPhase.PENDING)]
            assert rig.engine.knows(agent) and not rig.engine.knows("another")
            rig.want(2)  # the level, not a change
            await asyncio.sleep(0)
            assert rig.names(AgentPhase.PENDING) == [agent]

        self._run(test)
        (rig,) = rigs
        assert rig.names(AgentPhase.GONE) == rig.names(AgentPhase.PENDING)
        assert not rig.engine.knows(rig.names(AgentPhase.GONE)[0])

    def test_a_killed_agent_is_told_with_the_reason_and_replaced_when_it_is_wanted_again(self) -> None:
        async def test(rig: EngineRig) -> None:
            rig.want(1)
            (agent,) = await rig.joined(1)
            os.kill(rig.pid(agent), signal.SIGKILL)
            await rig.until(lambda: rig.names(AgentPhase.GONE))
            assert rig.changes[-1] == AgentChange(agent, AgentPhase.GONE, "its agent was killed by SIGKILL")
            assert not rig.engine.knows(agent)
            await asyncio.sleep(0.3)
            assert rig.names(AgentPhase.PENDING) == [agent], "started again although nobody asked"
            rig.want(1)
            (other,) = await rig.joined(1)
            assert other != agent

        self._run(test)

    def test_an_abandoned_agent_does_not_count_though_its_process_lives(self) -> None:
        async def test(rig: EngineRig) -> None:
            rig.want(1)
            (agent,) = await rig.joined(1)
            rig.engine.abandon(agent)
            rig.want(1)
            assert agent in await rig.joined(2)
            assert rig.engine.knows(agent)

        self._run(test)

    def test_killing_an_agent_ends_its_process(self) -> None:
        async def test(rig: EngineRig) -> None:
            rig.engine.kill("nobody")
            rig.want(1)
            (agent,) = await rig.joined(1)
            pid = rig.pid(agent)
            rig.engine.kill(agent)
            await rig.until(lambda: agent in rig.names(AgentPhase.GONE))
            await rig.until(lambda: not _is_running(pid))

        self._run(test)

    def test_a_gang_of_nobody_needs_no_agent(self) -> None:
        async def test(rig: EngineRig) -> None:
            _want_nothing: Sequence[Gang] = []
            rig.engine.want(_want_nothing)
            await asyncio.sleep(0)
            assert not rig.changes

        self._run(test)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""How many zygotes an agent keeps: real processes, which start workers cold and so import nothing."""

from __future__ import annotations

import asyncio
import sys

import pytest

from holdfast.agent import zygote_client
from holdfast.agent.function_memory import FunctionMemory
from holdfast.agent.spawner import SpawnError
from holdfast.agent.zygote_client import Zygotes, ZygoteSpawner
from holdfast.wire.messages import PrepareFunction, PrepareRun

_RUN = PrepareRun(function_key="", storage="", experiment="", trial_id="", trial_dir="", work_dir="")


class _Parent:
    def worker_started(self, generation: int, rank: int, pid: int) -> None: ...

    def worker_died(self, generation: int, rank: int, status: int, *, killed: bool) -> None: ...

    def workers_lost(self, why: str) -> None: ...

    def spawner_output(self, text: str) -> None: ...


async def _prepare(zygotes: Zygotes, key: str, run: str) -> ZygoteSpawner:
    function = FunctionMemory(PrepareFunction(key=key, function=b"", sys_path=[], environment={}, fork=False))
    spawner = zygotes.spawner(run, _Parent())
    await spawner.prepare(function, _RUN)
    function.close()
    return spawner


async def _processes(zygotes: Zygotes, count: int) -> None:
    """Wait until there are so many."""
    async with asyncio.timeout(60):
        while len(zygotes.processes) != count:
            await asyncio.sleep(0.01)


def test_unused_zygotes_are_bounded_and_used_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_client, "_IDLE_MAX", 1)

    async def test() -> None:
        zygotes = Zygotes([], adopts_orphans=False)
        used = await _prepare(zygotes, "used", "a")
        also = await _prepare(zygotes, "used", "b")
        assert len(zygotes.processes) == 1  # they share it
        for key in ("x", "y", "z"):
            (await _prepare(zygotes, key, key)).release()
        await _processes(zygotes, 2)
        assert list(zygotes._zygotes) == ["used", "z"]
        used.release()
        assert list(zygotes._zygotes) == ["used", "z"]
        also.release()
        await _processes(zygotes, 1)
        await zygotes.close()
        assert not zygotes.processes

    asyncio.run(test())


def test_a_zygote_that_cannot_run_is_an_error_of_those_who_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        zygotes = Zygotes([], adopts_orphans=False)
        used = await _prepare(zygotes, "used", "a")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/false")
            with pytest.raises(SpawnError, match="No worker can be started on this node: the zygote"):
                await _prepare(zygotes, "bad", "b")
        await used.ready()
        assert len(zygotes.processes) == 1
        await zygotes.close()

    asyncio.run(test())


def test_a_zygote_that_no_run_uses_is_ended_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_client, "_IDLE_S", 0.0)

    async def test() -> None:
        zygotes = Zygotes([], adopts_orphans=False)
        used = await _prepare(zygotes, "used", "a")
        (await _prepare(zygotes, "unused", "b")).release()
        await _processes(zygotes, 1)
        used.release()
        await _processes(zygotes, 0)
        await zygotes.close()

    asyncio.run(test())

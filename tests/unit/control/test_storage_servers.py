"""Who waits for a storage server is answered, whatever becomes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.control import storage_servers as module
from holdfast.control.storage_servers import StorageServers
from holdfast.streaming.server import Settings


def test_one_that_cannot_be_started_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no more processes may be made; the next agent that asks may be luckier."""
    start, tries = module._start, []

    async def failing(settings: Settings) -> asyncio.subprocess.Process:
        tries.append(settings)
        if len(tries) == 1:
            raise OSError(11, "Resource temporarily unavailable")
        return await start(settings)

    monkeypatch.setattr(module, "_start", failing)

    async def main() -> None:
        servers = StorageServers(lambda: ["127.0.0.1"])
        async with asyncio.timeout(60):
            first = await servers.serve(str(tmp_path))
            assert "cannot be started" in first.error and "temporarily unavailable" in first.error
            second = await servers.serve(str(tmp_path))
            assert (second.error, second.port > 0) == ("", True)
            await servers.close()

    asyncio.run(main())


def test_who_waits_when_the_driver_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def never(settings: Settings) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(module, "_start", never)

    async def main() -> str:
        servers = StorageServers(lambda: ["127.0.0.1"])
        waiting = asyncio.create_task(servers.serve(str(tmp_path)))
        async with asyncio.timeout(60):
            await begun.wait()
            await servers.close()
            return (await waiting).error

    assert asyncio.run(main()) == "the driver is about to end."


def test_one_that_dies_is_started_again_at_the_same_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that fails at first."""
    start = module._start
    started: list[tuple[Settings, asyncio.subprocess.Process]] = []
    failures: list[Settings] = []
    restarted = asyncio.Event()
    monkeypatch.setattr(module, "_RESTART_S", (0.01, 0.01))

    async def watched(settings: Settings) -> asyncio.subprocess.Process:
        if len(started) == 1 and not failures:
            failures.append(settings)
            raise OSError(12, "Cannot allocate memory")
        process = await start(settings)
        started.append((settings, process))
        if len(started) == 2:
            restarted.set()
        return process

    monkeypatch.setattr(module, "_start", watched)

    async def main() -> None:
        servers = StorageServers(lambda: ["127.0.0.1"])
        async with asyncio.timeout(60):
            served = await servers.serve(str(tmp_path))
            started[0][1].kill()
            await restarted.wait()
            assert failures and started[1][0].port == served.port
            assert await servers.serve(str(tmp_path)) == served
            await servers.close()

    asyncio.run(main())

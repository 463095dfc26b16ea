"""What a run leaves behind on an agent when it ends in the midst of something."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.agent.buffers import Buffers, SnapshotMemory
from holdfast.agent.platform import Platform
from holdfast.agent.run_host import RunHost
from holdfast.agent.session_dir import SessionDir
from holdfast.streaming.messages import ServedStorage
from holdfast.wire.messages import PrepareRun

_ORDER = PrepareRun(
    function_key="f",
    workers=1,
    storage="/nowhere/run",
    experiment="run",
    trial_id="run",
    trial_dir="/nowhere/run",
    work_dir="/nowhere/work",
    snapshot_key="key",
)


class _Server:
    def __init__(self) -> None:
        self.port = 1
        self.is_closed = threading.Event()

    def close(self) -> None:
        self.is_closed.set()


class _Platform(Platform):
    """One whose server takes a while to be there; nobody takes over from the driver."""

    def __init__(self, root: Path) -> None:
        super().__init__("127.0.0.1:1", "secret", root=root, spawners=_Spawners())  # type: ignore[arg-type]
        self.is_asked = asyncio.Event()
        self.may_serve = threading.Event()
        self.server = _Server()
        self._loop = asyncio.get_running_loop()

    def serve_snapshots(self, files: Any, address: str, key: str) -> Any:
        self._loop.call_soon_threadsafe(self.is_asked.set)
        assert self.may_serve.wait(60)
        return self.server

    def find_next_server(self, root: str, tokens: Sequence[str]) -> Any:
        raise AssertionError("nothing has to be stored")


class _Spawners:
    def spawner(self, run: str, parent: Any) -> None:
        return None


def _test(tmp_path: Path, body: Callable[[RunHost, _Platform], Awaitable[None]]) -> None:
    async def test() -> None:
        platform = _Platform(tmp_path)
        session = SessionDir("agent", tmp_path)
        host = RunHost(
            "r",
            ("agent", "host"),
            platform,
            session.run("r"),
            _Spawners(),  # type: ignore[arg-type]
            Buffers(1, SnapshotMemory(1 << 20)),
            "127.0.0.1",
            lambda _: None,
            lambda: 0,
            lambda: None,
        )
        try:
            await body(host, platform)
        finally:
            host._master_port.close()
            await host.close(0.0)
            session.remove()

    asyncio.run(test())


def test_a_server_of_snapshots_that_comes_after_the_end_of_its_run_is_closed(tmp_path: Path) -> None:
    async def body(host: RunHost, platform: _Platform) -> None:
        serving = asyncio.ensure_future(host._serve_snapshots(_ORDER))
        await platform.is_asked.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        platform.may_serve.set()
        assert await asyncio.to_thread(platform.server.is_closed.wait, 60)

    _test(tmp_path, body)


def test_a_run_without_uploads_waits_for_no_other_driver(tmp_path: Path) -> None:
    async def body(host: RunHost, platform: _Platform) -> None:
        host._served = ServedStorage(root="/nowhere", host="127.0.0.1", port=1, key="k")
        await host.finish_uploads()

    _test(tmp_path, body)

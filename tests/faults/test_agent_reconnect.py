"""The connection of an agent that comes back is cut, through a proxy: for less and for more than its silence limit."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.faults.agent_harness import RUN, AgentHarness, job_of, run_async, started_agent, wait_gone

from holdfast import train
from holdfast.core.events import AgentJoined
from holdfast.wire.channel import Channel
from holdfast.wire.messages import AgentMessage, Ping, Shutdown
from holdfast.wire.resumable_channel import ResumableChannel, read_opening, refuse

_REPORTS = 200


class _Proxy:
    """Passes the bytes of an agent's connections on, or cuts them."""

    def __init__(self) -> None:
        self.is_down = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, port: int) -> int:
        self._port = port
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """End all connections, and accept no other until `mend`."""
        self.is_down = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self.is_down = False

    async def close(self) -> None:
        self.cut()
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if self.is_down:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._tasks.add(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


class _Harness(AgentHarness):
    """A controller whose agent connects through a proxy, and comes back."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.proxy = _Proxy()
        self.connections = 0
        self._known: ResumableChannel[AgentMessage] | None = None

    def options(self) -> list[str]:
        return ["--drain-deadline", "0.2"]  # nobody here answers the announcement of a drain

    async def listen(self, port: int = 0) -> int:
        return await self.proxy.open(await super().listen(port))

    async def _accept(self, channel: Channel[AgentMessage]) -> None:
        opening = await read_opening(channel)
        if opening is None:
            return
        known = self._known
        if opening.received is not None and (known is None or known.incarnation != opening.incarnation):
            await refuse(channel, "This controller was started after the agent.")
            return
        if opening.received is None:
            self._known = known = ResumableChannel(channel.agent, opening.incarnation, comes_back=True)
        assert known is not None and opening.comes_back
        self._channel = known
        known.accept(channel, opening, self.silence_s)
        self.connections += 1
        pinging = asyncio.ensure_future(self._ping(known))
        await self._receive()
        pinging.cancel()

    async def _ping(self, channel: ResumableChannel[AgentMessage]) -> None:
        while True:
            channel.signal(Ping())
            await asyncio.sleep(self.silence_s / 8)

    def forget(self) -> None:
        """As a controller does that was killed and is started again."""
        self._known = None

    async def agent_ended(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = await super().agent_ended()
        await self.proxy.close()
        return code


@asynccontextmanager
async def _started(directory: Path, silence_s: float = 60.0) -> AsyncIterator[_Harness]:
    harness = _Harness(directory)
    harness.silence_s = silence_s
    async with started_agent(harness):
        yield harness


def _report_in_steps(config: dict[str, str]) -> None:
    """Reports some at once, and the rest when it is let."""
    directory = Path(config["directory"])
    for number in range(1, _REPORTS + 1):
        if number == _REPORTS // 2:
            (directory / "half").touch()
            while not (directory / "go").exists():
                pass
        train.report({"number": number, "text": "x" * 1000})
    (directory / "all").touch()
    signal.pause()


async def _exists(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.01)


def test_an_agent_that_comes_back_in_time_goes_on_and_loses_no_report(tmp_path: Path) -> None:
    async def test() -> None:
        async with _started(tmp_path / "agent") as harness:
            await harness.prepare(job_of(_report_in_steps, {"directory": str(tmp_path)}))
            pids = await harness.started()
            await _exists(tmp_path / "half")
            harness.proxy.cut()
            (tmp_path / "go").touch()
            await _exists(tmp_path / "all")  # workers do not notice
            harness.send(Ping(), RUN)
            harness.proxy.mend()
            await harness.expect_report(_REPORTS)
            assert [one.number for one in harness.reports] == list(range(1, _REPORTS + 1))
            assert harness.connections == 2 and Path(f"/proc/{pids[0]}").exists()
            await harness.stop()

    run_async(test)


@pytest.mark.parametrize("way", ["silence", "restart"])
def test_an_agent_that_has_lost_its_controller_stops_its_workers_and_offers_itself_with_its_zygote(
    tmp_path: Path, way: str
) -> None:
    """It has heard nothing for too long, or the controller that listens there now does not know it."""

    async def test() -> None:
        async with _started(tmp_path / "agent", 4.0 if way == "silence" else 60.0) as harness:
            job = job_of(_report_in_steps, {"directory": str(tmp_path)})
            (tmp_path / "marked.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('x')")
            warm: dict[str, Any] = {"sys_path": [str(tmp_path), *sys.path], "preload": ["marked"]}
            await harness.prepare(job, **warm)
            pids = await harness.started()
            await _exists(tmp_path / "half")
            harness.forget()
            harness.proxy.cut()
            if way == "restart":
                harness.proxy.mend()
            await wait_gone(*pids.values())
            harness.proxy.mend()
            await harness.expect(AgentJoined)
            await harness.prepare(job, **warm)
            (tmp_path / "go").touch()
            again = await harness.started()
            assert again.keys() == pids.keys() and again != pids
            await _exists(tmp_path / "all")
            assert (tmp_path / "imports").read_text() == "x"

    run_async(test)


def test_an_agent_without_a_connection_can_be_ended(tmp_path: Path) -> None:
    async def test() -> None:
        async with _started(tmp_path / "agent", 4.0) as harness:
            await harness.prepare(job_of(_report_in_steps, {"directory": str(tmp_path)}))
            pids = await harness.started()
            harness.proxy.cut()
            await wait_gone(*pids.values())
            assert await harness.agent_ended() == 0
            assert harness.leftovers() == []

    run_async(test)


def test_an_agent_that_comes_back_is_ended_by_its_controller(tmp_path: Path) -> None:
    async def test() -> None:
        async with _started(tmp_path / "agent") as harness:
            harness.send(Shutdown(), "")
            assert await AgentHarness.agent_ended(harness) == 0

    run_async(test)

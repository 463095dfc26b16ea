"""The control API over real sockets: requests go to the run that they name, and a slow client delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from holdfast.agent.platform import Platform
from holdfast.checkpoint.upload_locks import is_uploading
from holdfast.control.api import ControlApi
from holdfast.control.recent_logs import RecentLogs
from holdfast.errors import Unreachable
from holdfast.wire import control_messages as cm
from holdfast.wire.channel import Channel, connect_client, serve
from holdfast.wire.messages import AgentMessage, LogLine, StorageServed

SECRET = "correct horse"


class _Run:
    def __init__(self, name: str) -> None:
        self.name = name
        self.logs = RecentLogs()
        self.asked: list[cm.ControlRequest] = []

    def answer(self, request: cm.RunRequest) -> cm.ControlReply:
        self.asked.append(request)
        return cm.Done(text=self.name)

    def print(self, text: str, rank: int = 0) -> None:
        self.logs.add(1, [LogLine(rank, "stdout", text)])


async def _no_agent(channel: Channel[AgentMessage]) -> None:
    raise AssertionError("no agent connects here")


async def _find_storage(root: str) -> StorageServed | cm.Refused:
    return StorageServed(root=root, port=7, key="key") if root == "/runs/one" else cm.Refused(reason="not here")


def _run(test: Callable[[ControlApi, str], Awaitable[None]]) -> None:
    async def bounded() -> None:
        api = ControlApi(_find_storage)
        server = await serve("127.0.0.1", 0, SECRET, _no_agent, on_client=api.serve)
        try:
            async with asyncio.timeout(60):
                await test(api, f"127.0.0.1:{server.port}")
        finally:
            await server.close()

    asyncio.run(bounded())


async def _ask(client: Channel[cm.ControlReply], request: cm.ControlRequest, run: str) -> cm.ControlReply:
    await client.send(request, run)
    return await _next(client)


async def _next(client: Channel[cm.ControlReply]) -> cm.ControlReply:
    envelope = await client.recv()
    assert envelope is not None
    return envelope.message


def _texts(reply: cm.ControlReply) -> list[str]:
    assert isinstance(reply, cm.LogLines)
    return [line.text for line in reply.lines]


def test_a_request_is_for_the_run_that_it_names_and_for_no_other() -> None:
    async def test(api: ControlApi, address: str) -> None:
        one, other = _Run("one"), _Run("other")
        api.enter("1", one)
        api.enter("2", other)
        client = await connect_client(address, SECRET)
        assert await _ask(client, cm.StopRun(), "2") == cm.Done(text="other")
        assert (one.asked, other.asked) == ([], [cm.StopRun()])
        api.leave("2")
        refused = await _ask(client, cm.StopRun(), "2")
        assert isinstance(refused, cm.Refused) and "has no run '2'" in refused.reason
        assert await _ask(client, cm.GetStatus(), "1") == cm.Done(text="one")
        await client.close()

    _run(test)


def test_the_drafts_of_an_agent_that_finishes_uploads_are_open_as_long_as_it_is_connected() -> None:
    async def test(api: ControlApi, address: str) -> None:
        client = await connect_client(address, SECRET)
        refused = await _ask(client, cm.FindStorage(root="/runs/other", tokens=()), "")
        assert refused == cm.Refused(reason="not here")
        served = await _ask(client, cm.FindStorage(root="/runs/one", tokens=("abc", "abd")), "")
        assert served == StorageServed(root="/runs/one", port=7, key="key")
        assert is_uploading("abc") and is_uploading("abd")
        await client.close()
        while is_uploading("abc") or is_uploading("abd"):
            await asyncio.sleep(0)

    _run(test)


def test_an_upload_that_fails_at_the_next_driver_is_told_as_what_it_is_and_ends_the_connection() -> None:
    async def test(api: ControlApi, address: str) -> None:
        platform = Platform(address, SECRET, comes_back=True)
        with pytest.raises(Unreachable, match="storage server"):
            async with platform.find_next_server("/runs/one", ["abc"]) as served:
                assert served is not None and served.port == 7 and is_uploading("abc")
                raise Unreachable("The storage server has gone.")
        while is_uploading("abc"):
            await asyncio.sleep(0)

    _run(test)


def test_logs_are_followed_until_the_run_ends_and_filtered_by_rank() -> None:
    async def test(api: ControlApi, address: str) -> None:
        run = _Run("one")
        api.enter("1", run)
        run.print("before")
        run.print("other", rank=1)
        client = await connect_client(address, SECRET)
        assert _texts(await _ask(client, cm.ReadLogs(rank=0, follow=True), "1")) == ["before"]
        run.print("other again", rank=1)
        run.print("after")
        assert _texts(await _next(client)) == ["after"]
        run.print("last")
        api.leave("1")
        assert _texts(await _next(client)) == ["last"]
        assert await _next(client) == cm.LogsEnded()
        await client.close()

    _run(test)


def test_a_client_that_follows_may_ask_for_something_else_instead() -> None:
    async def test(api: ControlApi, address: str) -> None:
        run = _Run("one")
        api.enter("1", run)
        run.print("a line")
        client = await connect_client(address, SECRET)
        assert _texts(await _ask(client, cm.ReadLogs(follow=True), "1")) == ["a line"]
        assert await _ask(client, cm.GetStatus(), "1") == cm.Done(text="one")
        await client.close()

    _run(test)


def test_a_client_that_does_not_read_delays_nobody_and_learns_how_much_it_missed() -> None:
    async def test(api: ControlApi, address: str) -> None:
        run = _Run("one")
        api.enter("1", run)
        slow, quick = [await connect_client(address, SECRET) for _ in range(2)]
        slow._transport.pause_reading()
        await slow.send(cm.ReadLogs(follow=True), "1")
        printed = 0
        for _ in range(600):  # more than all buffers between them hold
            for _ in range(100):
                run.print(f"{printed:06d}" + "x" * 1000)
                printed += 1
            await asyncio.sleep(0)
        assert await _ask(quick, cm.GetStatus(), "1") == cm.Done(text="one")
        slow._transport.resume_reading()
        api.leave("1")
        seen: list[int] = []
        missed = 0
        while isinstance(reply := await _next(slow), cm.LogLines):
            missed += reply.left_out
            seen += [int(text[:6]) for text in _texts(reply)]
        assert reply == cm.LogsEnded()
        assert missed > 0 and missed + len(seen) == printed
        assert seen == sorted(set(seen)) and seen[-1] == printed - 1
        for client in (slow, quick):
            await client.close()

    _run(test)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_only_the_last_lines_are_kept(count: int) -> None:
    async def test() -> None:
        logs = RecentLogs(limit_chars=250)
        for number in range(count):
            logs.add(1, [LogLine(0, "stdout", f"{number}" * 20)])
        batches, left_out, position = logs.read(0)
        kept = [line.text[0] for batch in batches for line in batch.lines]
        assert kept == [str(number) for number in range(count)][-2:]
        assert (left_out, position) == (max(0, count - 2), count)
        assert logs.read(position) == ([], 0, count)

    asyncio.run(test())

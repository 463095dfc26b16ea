"""The hub's listeners, over real sockets."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.control.hub import Hub
from holdfast.errors import WireError
from holdfast.wire.channel import connect
from holdfast.wire.hello import Hello
from holdfast.wire.join_string import parse_address, parse_join_string

SECRET = "correct horse"


@pytest.mark.timeout(60)
def test_an_agent_may_come_before_the_run_that_takes_it() -> None:
    """The hub listens before the run has its lease, for which storage may take its time."""

    async def test() -> None:
        hub = Hub(secret=SECRET)
        await hub.open()
        address = parse_join_string(hub.join_strings[0])
        with pytest.raises(WireError, match="No run of this driver takes agents that join"):
            await connect(address, SECRET, Hello(agent="a"))
        hub.expect_agents()
        channel = await connect(address, SECRET, Hello(agent="a"))
        await channel.close()
        await hub.close()

    asyncio.run(test())


@pytest.mark.timeout(60)
def test_join_strings_are_read_while_another_address_is_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `fit()` reads them in its own thread."""
    reading, added = threading.Event(), threading.Event()

    def parse_slowly(address: str, what: str) -> tuple[str, int]:
        if threading.current_thread() is not threading.main_thread():
            reading.set()
            assert added.wait(30)
        return parse_address(address, what)

    async def test() -> None:
        hub = Hub(secret=SECRET)
        await hub.open()
        await hub.listen_at("127.0.0.1:0")
        monkeypatch.setattr("holdfast.control.hub.parse_address", parse_slowly)
        joining = asyncio.create_task(asyncio.to_thread(lambda: hub.join_strings))
        await asyncio.to_thread(reading.wait, 30)
        await hub.listen_at("localhost:0")
        added.set()
        assert len(await joining) == 2, "what it was when the reading began"
        assert len(hub.join_strings) == 3
        await hub.close()

    asyncio.run(test())

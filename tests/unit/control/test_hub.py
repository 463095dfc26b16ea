"""The hub's listeners, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.control.hub import Hub
from holdfast.errors import WireError
from holdfast.wire.channel import connect
from holdfast.wire.hello import Hello, installed_torch
from holdfast.wire.join_string import parse_join_string

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
def test_an_agent_with_another_minor_version_of_torch_is_refused_by_runs_that_use_it() -> None:
    async def test() -> None:
        hub = Hub(secret=SECRET)
        await hub.open()
        hub.expect_agents()
        address = parse_join_string(hub.join_strings[0])
        other = Hello(agent="a", torch="1.13.1")
        await (await connect(address, SECRET, other)).close()
        hub.expect_torch()
        with pytest.raises(WireError, match=r"Agent a has torch 1\.13\.1 and the controller torch 2\."):
            await connect(address, SECRET, other)
        major, minor, *_ = installed_torch().split(".")
        for fits in (f"{major}.{minor}.99+cu126", ""):
            await (await connect(address, SECRET, Hello(agent="a", torch=fits))).close()
        await hub.close()

    asyncio.run(test())

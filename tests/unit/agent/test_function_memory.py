"""One function, which several runs of an agent wait for."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.agent.function_memory import FunctionMemory
from holdfast.wire.messages import PrepareFunction


def test_a_run_that_is_ended_while_it_waits_for_the_function_takes_it_from_no_other() -> None:
    async def test() -> None:
        function = FunctionMemory(
            PrepareFunction(key="k", function=b"first", size_bytes=10, sys_path=[], environment={})
        )
        ended, other = (asyncio.ensure_future(function.ready()) for _ in range(2))
        await asyncio.sleep(0)
        ended.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended
        function.add(b"-last")
        await asyncio.wait_for(other, 10)
        assert function.is_whole
        function.close()

    asyncio.run(test())

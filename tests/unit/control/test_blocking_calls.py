"""Code of the user's that is called in a thread: whatever it raises arrives, and ends no event loop."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.control.blocking_calls import call_in_daemon_thread
from holdfast.errors import RunError


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_what_no_task_can_raise_is_raised_as_an_error_that_names_it(kind: type[BaseException]) -> None:
    """None of these comes out of a task as another exception does: one is lost, so that the caller waits for ever,
    others end the loop, or look like a cancellation."""

    def bad() -> None:
        raise kind("no more")

    async def main() -> str:
        async with asyncio.timeout(30):
            with pytest.raises(RunError, match=rf"^The searcher raised {kind.__name__}\('no more'\)") as raised:
                await asyncio.create_task(call_in_daemon_thread("The searcher", bad))
            assert isinstance(raised.value.__cause__, kind)
            return await call_in_daemon_thread("The searcher", lambda: "still here")

    assert asyncio.run(main()) == "still here"


def test_other_exceptions_are_raised_as_they_are() -> None:
    def bad() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        asyncio.run(call_in_daemon_thread("The searcher", bad))

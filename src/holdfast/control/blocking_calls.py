"""The blocking calls of one run, each in a thread of the hub's.

A thread cannot be cancelled: a task that waits for one may be, and the call goes on. What a run began must be over
before its lease is released, so its calls are counted here. Code of the user's that may never return is called in a
daemon thread instead, which keeps neither the run nor the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from holdfast.errors import RunError

__all__ = ["BlockingCalls", "call_in_daemon_thread"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def call_in_daemon_thread(what: str, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What the function returns, or raises; `what` names it in errors. If the caller is cancelled, the thread goes on,
    and nobody waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(settle_future: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            settle_future(value)

    def call() -> None:
        try:
            done = functools.partial(settle, future.set_result, function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            done = functools.partial(settle, future.set_exception, _for_task(what, error))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(call,), name="holdfast-user-code", daemon=True).start()
    return await future


def _for_task(what: str, error: BaseException) -> Exception:
    """What a task can raise in its place: StopIteration cannot be handed over to one, and what is no `Exception` would
    end the event loop with all that runs on it, or pass for a cancellation."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    made = RunError(f"{what} raised {error!r}: let it return, or raise an exception of another class.")
    made.__cause__ = error
    return made


class BlockingCalls:
    """`run` is what `asyncio.to_thread` is, but for `finished`."""

    def __init__(self) -> None:
        self._going_on: set[asyncio.Future[Any]] = set()

    async def run(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """What the function returns, called in a thread."""
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        future = asyncio.get_running_loop().run_in_executor(None, call)
        self._going_on.add(future)
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    async def finished(self) -> None:
        """Wait until every call has returned, those included whose caller was cancelled."""
        while self._going_on:
            await asyncio.wait(self._going_on)

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._going_on.discard(future)
        if not future.cancelled():
            future.exception()  # looked at, where the caller was cancelled

"""The hub of this process, and the thread that it lives in: made by the first `fit()`, ended with the last.

The controllers live in a thread of their own, so that they work wherever `fit()` is called, notebooks included. What
the calling threads do meanwhile is in `driver_thread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

from holdfast.control.driver_thread import DriverThread
from holdfast.control.hub import Hub
from holdfast.core.commands import RunStatus
from holdfast.core.events import StopRequested
from holdfast.engines.driver_fork import ForkedAgent
from holdfast.engines.engine import EngineName
from holdfast.engines.local import LocalEngine
from holdfast.storage.run_secret import open_secret

__all__ = ["HubGuest", "HubThread", "join_hub"]

_THREADS = 32
"""For storage requests of all runs; started as they are needed."""


class HubGuest(Protocol):
    """What runs on a hub: the controller of a run, or of an experiment."""

    def post_threadsafe(self, event: StopRequested) -> None:
        """From any thread or signal handler."""
        ...

    def stop_by(self, stop: Callable[[StopRequested], None]) -> None:
        """Control clients that stop the guest do so by calling this."""
        ...

    async def run(self) -> RunStatus: ...


class HubThread:
    """A hub with its event loop. Methods are called from the threads of its guests."""

    def __init__(self, forked: ForkedAgent | None = None) -> None:
        """`forked` is to be the first agent."""
        self.guests = 0
        self._drivers: list[DriverThread] = []
        self._opened: Future[asyncio.AbstractEventLoop] = Future()
        self._ended: asyncio.Event
        self._hub = Hub(make_engine=partial(LocalEngine, forked=forked), secret=open_secret())
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(),), name="holdfast-hub")
        self._thread.start()

    def listen(self, address: str | None, engine: EngineName, storage: Path | None) -> str:
        """Accept agents and control clients at this address, too, unless it is None, for a run of this engine, whose
        files lie in the directory `storage`, if in any. Gives the join string for other machines, if they can reach
        this one; raises what kept the hub from listening."""
        listening = self._listen(address, engine, storage)
        asyncio.run_coroutine_threadsafe(listening, self._opened.result()).result()
        return self._hub.join_strings[0]

    async def _listen(self, address: str | None, engine: EngineName, storage: Path | None) -> None:
        if storage is not None and engine is not EngineName.LOCAL:
            self._hub.expect_uploads(str(storage))
        if engine is EngineName.JOIN:
            self._hub.expect_agents()
        if address is not None:
            await self._hub.listen_at(address)

    def run(self, make_controller: Callable[[Hub], HubGuest], driver_thread: DriverThread) -> RunStatus:
        """Run a controller as a guest, and the calling thread beside it; what the controller's `run` returns."""
        with driver_thread.signals(self._stop_guests):
            loop = self._opened.result()
            self._drivers.append(driver_thread)
            status = asyncio.run_coroutine_threadsafe(self._run_guest(make_controller, driver_thread), loop)
            status.add_done_callback(lambda _: driver_thread.put(None))
            try:
                driver_thread.serve()
            except BaseException as error:  # nobody may leave this thread while the other one works
                driver_thread.stop(StopRequested(why=type(error).__name__, force=True))
                status.exception()
                raise
            finally:
                self._drivers.remove(driver_thread)
        if driver_thread.left_by is not None:
            raise driver_thread.left_by
        return status.result()

    def close(self) -> None:
        """End the thread; there are no guests any more."""
        with contextlib.suppress(Exception):  # if it could not be opened, its first guest was told
            self._opened.result().call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _stop_guests(self, request: StopRequested) -> None:
        """A signal is for the process: every run of it is stopped."""
        for driver_thread in list(self._drivers):
            driver_thread.stop(request)

    async def _run_guest(self, make_controller: Callable[[Hub], HubGuest], driver_thread: DriverThread) -> RunStatus:
        controller = make_controller(self._hub)
        driver_thread.connect(controller.post_threadsafe)
        controller.stop_by(driver_thread.stop_from_hub)
        return await controller.run()

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, "holdfast-storage"))
        self._ended = asyncio.Event()
        try:
            await self._hub.open()
        except BaseException as error:  # noqa: BLE001  handed over to the thread that waits
            self._opened.set_exception(error)
            return
        self._opened.set_result(loop)
        await self._ended.wait()
        await self._hub.close()


_lock = threading.Lock()
_current: HubThread | None = None


@contextlib.contextmanager
def join_hub(forked: ForkedAgent | None = None) -> Iterator[HubThread]:
    """The hub of this process for the time of the block; one that is made has a `forked` agent to begin with."""
    global _current
    with _lock:
        hub = _current = _current or HubThread(forked)
        hub.guests += 1
    try:
        yield hub
    finally:
        with _lock:
            hub.guests -= 1
            is_last = hub.guests == 0
            if is_last and _current is hub:
                _current = None  # who comes from here on makes another
        if is_last:
            hub.close()


def _forget() -> None:
    """A forked child has the hub's memory, but not its thread."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

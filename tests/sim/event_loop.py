"""An asyncio event loop on virtual time, for many simulated processes in one thread.

Nothing is waited for: when nothing is ready, the clock jumps to the next timer. Every callback belongs to the process
in whose context it was scheduled (`process_var`), so a process that was killed never runs again, and one that was
stopped goes on where it was. Callbacks of one time run in the order in which they were scheduled: a seed decides all.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.sim.process import Process

__all__ = ["VirtualLoop", "process_var"]

_T = TypeVar("_T")
process_var: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Handle:
    """One scheduled callback, as `asyncio.TimerHandle`."""

    __slots__ = ("_args", "_callback", "_context", "_is_cancelled", "_process", "_when")

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._context = contextvars.copy_context() if context is None else context
        self._process = self._context.get(process_var)
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def when(self) -> float:
        return self._when

    def run(self) -> None:
        process = self._process
        if self._is_cancelled:
            return
        if process is None or process.is_running:
            self._context.run(self._callback, *self._args)
        elif process.is_alive:
            process.held.append(self)


class VirtualLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as coroutines, tasks, timeouts and streams need."""

    def __init__(self) -> None:
        self.steps = 0
        self.errors: list[dict[str, Any]] = []
        """What nobody handled: exceptions of tasks that nobody awaits, for instance."""
        self._stopped = False
        self._now = 0.0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = itertools.count()
        self._tasks: list[asyncio.Task[Any]] = []
        """Kept to the end, or the garbage collector would run the `finally` clauses of killed processes."""

    # ------------------------------------------------------------ what asyncio calls

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(self._now, callback, args, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(when, callback, args, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, _T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[_T]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """In a thread of the process that asks; `asyncio.to_thread` calls this, too."""
        process = process_var.get()
        assert process is not None
        return process.run_in_thread(functools.partial(func, *args))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)
        self.stop()

    # ------------------------------------------------------------ what the simulation calls

    def stop(self) -> None:
        self._stopped = True

    def again(self, handles: list[Handle]) -> None:
        """Run these once more: they belonged to a process that was stopped, and is not any more."""
        self._ready.extend(handles)

    def run(self, until_s: float, steps_max: int) -> bool:
        """Until `stop`, or time or patience is up; True if it was stopped in time."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while not self._stopped:
                while self._timers and self._timers[0][0] <= self._now:
                    self._ready.append(heapq.heappop(self._timers)[2])
                if not self._ready:
                    if not self._timers or self._timers[0][0] > until_s:
                        return False
                    self._now = self._timers[0][0]
                    continue
                self.steps += 1
                if self.steps > steps_max:
                    return False
                self._ready.popleft().run()
        finally:
            asyncio._set_running_loop(before)
        return True

    def discard(self) -> None:
        """Throw away what is left of every task, without a word of any."""
        self._ready.clear()
        self._timers.clear()
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # some coroutines have never been awaited
                for task in self._tasks:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    if not task.done():
                        _close(task.get_coro())
                self._tasks.clear()
        finally:
            asyncio._set_running_loop(before)


def _close(coroutine: Any) -> None:
    """End a coroutine, also where it awaits something in each of several `finally` clauses."""
    while coroutine.cr_frame is not None:
        try:
            coroutine.close()
        except (RuntimeError, AssertionError):
            continue

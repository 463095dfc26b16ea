"""A simulated process: what its code is given instead of the real machine, and how it is killed, stopped and continued.

Coroutines run on the `VirtualLoop`. A blocking function runs in a greenlet, which stands for a thread: at each request
to storage, and whenever it sleeps, it gives way to everybody else. A process that is killed is simply never continued;
its request that is under way then took place, or did not, or (where the storage is not atomic) half of it did.
"""

from __future__ import annotations

import contextvars
import functools
import random
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import greenlet
from tests.sim.event_loop import Handle, process_var

from holdfast.errors import HoldfastError
from holdfast.runtime import Runtime, runtime_var

if TYPE_CHECKING:
    import asyncio

    from tests.sim.simulation import Simulation

__all__ = ["Process"]

_T = TypeVar("_T")
_R = TypeVar("_R")
_EPOCH_S = 1_700_000_000.0
"""What clocks show when a simulation begins."""
_WRITES = frozenset({"put", "create", "copy", "delete"})


class Process:
    """One process on one host."""

    def __init__(self, sim: Simulation, name: str, host: str) -> None:
        self.sim, self.name, self.host = sim, name, host
        self.pid = len(sim.processes) + 1
        sim.processes[self.pid] = self
        self.started_ticks = 1 + int(sim.loop.time() * 100)
        self.is_alive, self.is_stopped = True, False
        self.is_running = True
        """Alive and not stopped."""
        self.held: list[Handle] = []
        """What would have run while it was stopped."""
        self.on_death: list[Callable[[], None]] = []
        self.random = random.Random(sim.random.getrandbits(64))
        self.clock_offset_s = sim.random.uniform(-300.0, 300.0)
        """Clocks of two machines need not agree."""
        self.context = contextvars.Context()
        self.context.run(process_var.set, self)
        self.context.run(runtime_var.set, SimulatedRuntime(self))
        self.busy_threads = 0
        """How many blocking functions are under way."""
        self._threads: list[greenlet.greenlet] = []
        self._looks: dict[tuple[greenlet.greenlet, str], int] = {}
        self._requests: dict[int, tuple[Handle, str, str, Callable[[], Any], bytes | None]] = {}

    # ------------------------------------------------------------ running

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        return self.sim.loop.create_task(work, context=self.context.copy())

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have it call something, as a signal handler would."""
        self.sim.loop.call_soon(function, *arguments, context=self.context.copy())

    def after(self, seconds: float, function: Callable[..., object], *arguments: object) -> None:
        self.sim.loop.call_later(seconds, function, *arguments, context=self.context.copy())

    # ------------------------------------------------------------ signals

    def kill(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = self.is_running = False
        self.held.clear()
        for handle, verb, key, effect, data in list(self._requests.values()):
            handle.cancel()
            self._interrupt(verb, key, effect, data)
        self._requests.clear()
        for tell in self.on_death:
            tell()

    def stop(self) -> None:
        """SIGSTOP, or a machine that stands still."""
        if self.is_alive:
            self.is_stopped, self.is_running = True, False

    def go_on(self) -> None:
        if self.is_alive and self.is_stopped:
            self.is_stopped, self.is_running = False, True
            held, self.held = self.held, []
            self.sim.loop.again(held)

    def exit(self) -> None:
        """It ends by itself: nothing of it is under way."""
        self.kill()

    def discard(self) -> None:
        """End what is left of its threads; none of them can do anything any more."""
        self.is_alive = self.is_running = False
        for thread in self._threads:
            if not thread.dead:
                try:
                    thread.throw()
                except HoldfastError:
                    continue
        self._threads.clear()

    # ------------------------------------------------------------ threads

    def start_thread(self, function: Callable[..., object], *arguments: object) -> None:
        thread = greenlet.greenlet(function, parent=self.sim.hub)
        thread.gr_context = contextvars.copy_context()
        self._threads.append(thread)
        self.sim.loop.call_soon(thread.switch, *arguments)

    def run_in_thread(self, function: Callable[[], _R]) -> asyncio.Future[_R]:
        future: asyncio.Future[_R] = self.sim.loop.create_future()

        def work() -> None:
            self.busy_threads += 1
            try:
                answer = function()
            except Exception as error:  # noqa: BLE001  handed over to whoever waits
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(answer)
            finally:
                self.busy_threads -= 1

        self.start_thread(work)
        return future

    def give_way(self) -> Any:
        """Let everybody else run until somebody switches to this thread; what it is switched to with."""
        if not self.is_alive:
            raise greenlet.GreenletExit
        return self.sim.hub.switch()

    def sleep(self, seconds: float) -> None:
        self.sim.loop.call_later(seconds, greenlet.getcurrent().switch)
        self.give_way()

    # ------------------------------------------------------------ storage

    def carry_out(self, verb: str, key: str, effect: Callable[[], _T], data: bytes | None = None) -> _T:
        """A request to storage (see `tests.sim.memory_store`): it takes effect after a while, and may fail before or
        after that. A deletion takes effect at once, since stores have no conditional one: see docs/architecture.md."""
        sim, thread = self.sim, greenlet.getcurrent()
        if not self.is_alive:
            raise greenlet.GreenletExit
        assert thread is not sim.hub, f"{self.name} blocks its event loop: {verb} {key}"
        failure = sim.request_failure(self, verb, key)
        takes_place = failure is None or (verb in _WRITES and sim.is_answer_lost(failure))

        def act() -> Any:
            if not takes_place:
                return failure
            try:
                answer = effect()
            except HoldfastError as error:
                return failure or error
            if verb in _WRITES:
                sim.wrote(self, verb, key)
            return failure or answer

        def arrive(answer: Any = None) -> None:
            del self._requests[number]
            if verb != "delete":
                answer = act()
            if self.is_running:
                thread.switch(answer)
            elif self.is_alive:
                self.held.append(Handle(sim.loop.time(), thread.switch, (answer,), self.context.copy()))

        if verb not in _WRITES:
            self._looks[thread, key] = sim.bucket.last_version
        number = next(sim.numbers)
        arguments = (act(),) if verb == "delete" else ()
        handle = sim.loop.call_later(sim.delay_s(sim.scenario.storage_s), arrive, *arguments, context=sim.network)
        self._requests[number] = (handle, verb, key, effect, data)
        answer = self.give_way()
        if isinstance(answer, HoldfastError):
            raise answer
        return answer  # type: ignore[no-any-return]

    def looked_at(self, key: str) -> int:
        """How much had been written to the bucket when the running thread last read a key, or listed a directory."""
        return self._looks.get((greenlet.getcurrent(), key), 0)

    def _interrupt(self, verb: str, key: str, effect: Callable[[], Any], data: bytes | None) -> None:
        """The process died while this request was under way."""
        roll = self.sim.random.random()
        if verb not in _WRITES or verb == "delete" or roll < 0.3:
            return
        if data is not None and self.sim.scenario.tears and roll > 0.5:
            self.sim.tear(key, data)
            return
        try:
            effect()
        except HoldfastError:
            return
        self.sim.wrote(self, verb, key)


class SimulatedRuntime(Runtime):
    """What code of a simulated process is given by `holdfast.runtime.current`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def now(self) -> float:
        return _EPOCH_S + self._process.clock_offset_s + self._process.sim.loop.time()

    def monotonic(self) -> float:
        return self._process.sim.loop.time()

    def sleep(self, seconds: float) -> None:
        self._process.sleep(seconds)

    def uniform(self, low: float, high: float) -> float:
        return self._process.random.uniform(low, high)

    def token_hex(self, size_bytes: int) -> str:
        return f"{self._process.random.getrandbits(8 * size_bytes):0{2 * size_bytes}x}"

    def map_in_threads(self, function: Callable[[_T], _R], items: Iterable[_T], threads: int) -> list[_R]:
        work = list(items)
        if len(work) < 2:
            return [function(item) for item in work]
        process, caller = self._process, greenlet.getcurrent()
        found: dict[int, _R] = {}
        errors: dict[int, Exception] = {}

        def one(n: int) -> None:
            try:
                found[n] = function(work[n])
            except Exception as error:  # noqa: BLE001  handed over to whoever waits
                errors[n] = error
            if len(found) + len(errors) == len(work):
                process.sim.loop.call_soon(caller.switch)

        for n in range(len(work)):
            process.start_thread(one, n)
        process.give_way()
        if errors:
            raise errors[min(errors)]
        return [found[n] for n in range(len(work))]

    def pid(self) -> int:
        return self._process.pid

    def machine(self) -> tuple[str, str, str]:
        return self._process.host, f"boot of {self._process.host}", "pid:[1]"

    def process_status(self, pid: int) -> tuple[str, int] | None:
        found = self._process.sim.processes.get(pid)
        if found is None or not found.is_alive:
            return None
        return "T" if found.is_stopped else "S", found.started_ticks

    def make_executor(self, threads: int, name: str, initializer: Callable[[], None]) -> Executor:
        return _SimulatedExecutor(self._process)

    def lock_file(self, path: Path) -> Callable[[], None]:
        process = self._process
        lock = (process.host, str(path))
        process.sim.locks.add(lock)

        def release() -> None:
            process.sim.locks.discard(lock)

        process.on_death.append(release)
        return release

    def has_locked_file(self, directory: Path, pattern: str) -> bool:
        host = self._process.host
        return any(one == host and fnmatchcase(path, pattern) for one, path in self._process.sim.locks)


class _SimulatedExecutor(Executor):
    """Each call runs in a simulated thread of its own; nobody asks how it ended."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Any:
        self._process.run_in_thread(functools.partial(function, *arguments, **options))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is held."""

"""The agent's end of the zygote: starts it, sends it descriptors, is told of workers' starts and deaths, and ends it.

A process (`zygote.zygote`) is the parent of all workers that run the same function in the same environment, forked or
cold, so that their deaths, their orphans and the death of this agent are handled in one place. A zygote that cannot be
forked safely is replaced by one that starts workers cold; one that was killed is replaced by another of its kind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.agent.function_memory import FunctionMemory
from holdfast.agent.output import Lines
from holdfast.agent.spawner import Parent, SpawnError
from holdfast.linux.exit_status import exit_status_of
from holdfast.linux.process_killing import end_children
from holdfast.wire.frames import Splitter, encode
from holdfast.wire.messages import PrepareRun
from holdfast.worker.job import Assignment
from holdfast.worker.stdio import WorkerFds
from holdfast.zygote.messages import (
    AddImports,
    Cleared,
    Died,
    Dismiss,
    Fork,
    Forked,
    FromZygote,
    ImportAhead,
    Kill,
    Load,
    TookOver,
    ToZygote,
    Warm,
)

__all__ = ["ForkedZygote", "ZygoteSpawner", "Zygotes"]

_log = logging.getLogger(__name__)
_CLEAR_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0
_IDLE_S = 60.0
"""How long a zygote that no run uses is kept."""
_IDLE_MAX = 4
"""How many of those are kept."""
_RECEIVE_BYTES = 64 * 1024
_decoder: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)


class ForkedZygote(NamedTuple):
    """A zygote that was forked from this process, when that had one thread, and has loaded nothing yet."""

    pid: int
    control: socket.socket
    output: int
    """Where its output can be read."""


class Zygotes:
    """The zygotes of an agent, by the function that they have loaded: runs with the same one share one.

    One that no run uses stays for a while, so that the next run with its function need not import anything."""

    def __init__(self, leftovers: list[Path], *, adopts_orphans: bool) -> None:
        """`leftovers` go when this process is killed. `adopts_orphans`: it is a subreaper and has no children but
        zygotes, so it may kill what else becomes its child."""
        self.adopts_orphans = adopts_orphans
        self.leftovers = [str(path) for path in leftovers]
        self._zygotes: dict[str, _Zygote] = {}
        """In the order in which they were last used."""
        self.processes: set[_ZygoteProcess] = set()
        self._spare: _ZygoteProcess | None = None

    def spawner(self, run: str, parent: Parent) -> ZygoteSpawner:
        return ZygoteSpawner(self, run, parent)

    def launch(self, forked: ForkedZygote | None = None, imports: Sequence[str] = ()) -> None:
        """Start a zygote before there is a function, so that it runs, and has imported these modules, when one arrives;
        unless one was `forked`."""
        self._spare = self._add_process(forked)
        self._spare.send(ImportAhead(modules=list(imports), leftovers=self.leftovers))

    def take_process(self) -> _ZygoteProcess:
        """A zygote process that has loaded nothing."""
        spare, self._spare = self._spare, None
        if spare is not None and not spare.lost:
            return spare
        return self._add_process()

    def _add_process(self, forked: ForkedZygote | None = None) -> _ZygoteProcess:
        process = _ZygoteProcess(self, forked)
        self.processes.add(process)
        return process

    def use(self, function: FunctionMemory, imports: list[str]) -> _Zygote:
        """The zygote of this function. One that is started imports these modules, too."""
        key = function.order.key
        zygote = self._zygotes.pop(key, None) or _Zygote(self, function, imports)
        self._zygotes[key] = zygote
        return zygote

    def end_idle(self, zygote: _Zygote | None = None) -> None:
        """End this zygote if no run uses it; and those unused for longest, where there are too many."""
        idle = [one for one in self._zygotes.values() if not one.users]
        doomed = set(idle[: max(0, len(idle) - _IDLE_MAX)])
        if zygote in idle:
            doomed.add(zygote)
        for key, one in list(self._zygotes.items()):
            if one in doomed:
                del self._zygotes[key]
                one.end()

    async def close(self) -> None:
        self._zygotes.clear()
        self._spare = None
        await asyncio.gather(*(process.end(_CLOSE_TIMEOUT_S) for process in list(self.processes)))


class _Zygote:
    """A zygote that has loaded one function; its process is replaced when it dies or cannot be forked safely."""

    def __init__(self, zygotes: Zygotes, function: FunctionMemory, imports: list[str]) -> None:
        order = function.order
        self._zygotes = zygotes
        self._function = function
        self._load = Load(
            sys_path=order.sys_path,
            environment=order.environment,
            preload=[*order.preload, *(name for name in imports if name not in order.preload)],
            fork=order.fork,
            leftovers=zygotes.leftovers,
            agent_is_subreaper=zygotes.adopts_orphans,
        )
        self.cold_reason = None if order.fork else "the run asks for it"
        self.users: dict[str, Parent] = {}
        """The runs that use it, and whom to call for each."""
        self._process: _ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Returns when `process` can start workers without a wait."""
        async with self._starting:
            while True:
                if self._process is None or self._process.lost:
                    await self._end_process()
                    self._process = self._zygotes.take_process()
                process = self._process
                if not process.loaded:
                    process.load(self._load, self._function.fd, self)
                reason = await asyncio.shield(process.warm)
                if reason is None:
                    return
                if process.from_driver:
                    _log.info("The zygote that was forked from the driver is replaced: %s", reason)
                    await self._end_process()
                    continue
                if not self._load.fork:
                    raise SpawnError(f"No worker can be started on this node: {reason}")
                self.cold_reason = reason
                self.spawner_output(f"Workers are started cold from now on: {reason}.")
                self._load = msgspec.structs.replace(self._load, fork=False)
                await self._end_process()

    @property
    def process(self) -> _ZygoteProcess | None:
        """The process, if it lives."""
        return None if self._process is None or self._process.lost else self._process

    @property
    def forks(self) -> bool:
        return self._load.fork

    def attach(self, run: str, parent: Parent) -> None:
        self.users[run] = parent
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def detach(self, run: str) -> None:
        """A run needs it no more; without any it is ended after a while."""
        self.users.pop(run, None)
        if not self.users:
            self._timer = asyncio.get_running_loop().call_later(_IDLE_S, self._zygotes.end_idle, self)
            self._zygotes.end_idle()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ending = asyncio.get_running_loop().create_task(self._end_process())

    async def _end_process(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await process.end(_CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ calls of its process

    def forked(self, message: Forked) -> None:
        if (parent := self.users.get(message.run)) is not None:
            parent.worker_started(message.generation, message.rank, message.pid)

    def died(self, message: Died) -> None:
        if (parent := self.users.get(message.run)) is not None:
            parent.worker_died(message.generation, message.rank, message.status, killed=message.killed)

    def workers_lost(self, why: str, but: str = "") -> None:
        """The process is gone, and all workers with it: tell the runs, `but` the one that has them killed."""
        for run, parent in list(self.users.items()):
            if run != but:
                parent.workers_lost(why)

    def spawner_output(self, text: str) -> None:
        for parent in list(self.users.values()):
            parent.spawner_output(text)


class ZygoteSpawner:
    """A `Spawner` of one run by way of a zygote, which it may share with others."""

    def __init__(self, zygotes: Zygotes, run: str, parent: Parent) -> None:
        self._zygotes = zygotes
        self._run = run
        self._parent = parent
        self._zygote: _Zygote | None = None

    async def prepare(self, function: FunctionMemory, order: PrepareRun) -> str | None:
        self.release()
        self._zygote = zygote = self._zygotes.use(function, order.config_modules)
        zygote.attach(self._run, self._parent)
        await zygote.ready()
        return zygote.cold_reason

    async def ready(self) -> None:
        assert self._zygote is not None, "a generation was started before the job was prepared"
        await self._zygote.ready()

    def spawn(self, assignment: Assignment, worker_fds: WorkerFds) -> None:
        process = None if self._zygote is None else self._zygote.process
        if process is not None:
            process.send(Fork(assignment=assignment, listens=worker_fds.listen is not None), worker_fds.fds)
        else:
            for fd in worker_fds.fds:
                os.close(fd)
            # It died a moment ago, after `ready`.
            why = "was lost with its parent process, the zygote"
            asyncio.get_running_loop().call_soon(self._parent.workers_lost, why)

    async def clear(self, generation: int) -> None:
        if self._zygote is None or (process := self._zygote.process) is None:
            return
        try:
            async with asyncio.timeout(_CLEAR_TIMEOUT_S):
                await process.clear(self._run, generation)
        except TimeoutError:
            self._parent.spawner_output(f"The zygote did not clear generation {generation} in time and is replaced.")
            await process.end(0.0)
            why = "was lost with its parent process, the zygote, which had to be replaced"
            self._zygote.workers_lost(why, self._run)

    def add_imports(self, modules: list[str]) -> None:
        if self._zygote is not None and self._zygote.forks and (process := self._zygote.process) is not None:
            process.send(AddImports(modules=modules))

    def release(self) -> None:
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            zygote.detach(self._run)


class _ZygoteProcess:
    """One zygote process and the socket to it."""

    def __init__(self, zygotes: Zygotes, forked: ForkedZygote | None = None) -> None:
        self._zygotes = zygotes
        self._loop = asyncio.get_running_loop()
        self._zygote: _Zygote | None = None
        """Whose process it is, once it has loaded something."""
        self._splitter = Splitter()
        self._lines = Lines()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._clearing: dict[str, asyncio.Future[None]] = {}
        """For each run whose workers are being killed: done when nothing of them is left."""
        self.warm: asyncio.Future[str | None] = self._loop.create_future()
        self.loaded = False
        self.lost = False
        self._ended: asyncio.Task[None] | None = None
        self._reaped = False
        self.from_driver = forked is not None
        """Whether modules of the driver were there before it imported any."""
        self._process: subprocess.Popen[bytes] | None = None
        if forked is not None:
            self.pid, self._control, self._output = forked
        else:
            self._process = self._start()
            self.pid = self._process.pid
        self._control.setblocking(False)
        self._fd = self._control.fileno()
        self._writes = False
        """Whether the event loop waits until the socket takes more."""
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._fd, self._receive)
        self._loop.add_reader(self._output, self._read_output)

    def _start(self) -> subprocess.Popen[bytes]:
        self._control, theirs = socket.socketpair()
        self._output, output = os.pipe()
        try:
            with theirs:
                command = [sys.executable, "-m", "holdfast.zygote.zygote", str(theirs.fileno()), str(os.getpid())]
                return subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
        finally:
            os.close(output)

    def send(self, order: ToZygote, fds: list[int] | None = None) -> None:
        """Send one order; descriptors are closed here once they are on their way."""
        self._unsent.append((memoryview(encode(order)), fds or []))
        if len(self._unsent) == 1:
            self._write()

    def load(self, load: Load, function_fd: int, zygote: _Zygote) -> None:
        self.loaded = True
        self._zygote = zygote
        self.send(load, [os.dup(function_fd)])

    async def clear(self, run: str, generation: int) -> None:
        if run not in self._clearing:
            self._clearing[run] = self._loop.create_future()
            self.send(Kill(run=run, generation=generation))
        await asyncio.shield(self._clearing[run])

    async def end(self, patience_s: float) -> None:
        """Have it kill everything and exit; kill it after `patience_s`. Orphans that become our children are killed
        too. Ending twice is fine."""
        if self._ended is None:
            self._ended = self._loop.create_task(self._end(patience_s))
        await asyncio.shield(self._ended)

    async def _end(self, patience_s: float) -> None:
        if not self.lost:
            self.send(Dismiss())
        self._close()
        if not self._reaped:
            self._signal(signal.SIGTERM)
            pidfd = os.pidfd_open(self.pid)
            gone = asyncio.Event()
            self._loop.add_reader(pidfd, gone.set)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await gone.wait()
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            self._signal(signal.SIGKILL)
            self._reap()
        self._end_orphans()
        self._finish_clear(list(self._clearing))

    # ------------------------------------------------------------------ the process

    def _signal(self, number: int) -> None:
        """It is a child of this process and was not waited for, so the pid is its own."""
        os.kill(self.pid, number)

    def _reap(self) -> int:
        """Wait for its end; gives the status as of wait(2)."""
        self._reaped = True
        if self._process is not None and self._process.pid == self.pid:
            return _wait_status(self._process.wait())
        return os.waitpid(self.pid, 0)[1]

    def _replace_process(self, pid: int) -> None:
        """The process that was started here has ended, and the one that takes its place is now a child of ours."""
        self._reap()
        self._reaped = False
        self.pid = pid

    # ------------------------------------------------------------------ the socket

    def _write(self) -> None:
        while self._unsent and not self.lost:
            data, fds = self._unsent[0]
            try:
                sent = socket.send_fds(self._control, [data], fds) if fds else self._control.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._fd, self._write)
                self._writes = True
                return
            except OSError:
                break  # its death comes by way of the reader
            for fd in fds:
                os.close(fd)
            self._unsent[0] = (data[sent:], [])
            if sent == len(data):
                self._unsent.popleft()
        if not self.lost:
            self._write_no_more()

    def _write_no_more(self) -> None:
        if self._writes:
            self._loop.remove_writer(self._fd)
            self._writes = False

    def _receive(self) -> None:
        try:
            data = self._control.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for body in self._splitter.feed(data):
            self._handle(_decoder.decode(body))
        if not data:
            self._handle_death()

    def _handle(self, message: FromZygote) -> None:
        if isinstance(message, Warm):
            if not self.warm.done():
                self.warm.set_result(message.cold_reason)
        elif isinstance(message, Forked):
            if self._zygote is not None:
                self._zygote.forked(message)
        elif isinstance(message, Died):
            if self._zygote is not None:
                self._zygote.died(message)
        elif isinstance(message, Cleared):
            self._finish_clear([message.run])
        else:
            assert isinstance(message, TookOver)
            self._replace_process(message.pid)

    def _finish_clear(self, runs: list[str]) -> None:
        for run in runs:
            if (cleared := self._clearing.pop(run, None)) is not None and not cleared.done():
                cleared.set_result(None)

    def _handle_death(self) -> None:
        """The zygote is dead, and by PR_SET_PDEATHSIG so are its workers; what those had started is now a child of
        ours, and is killed."""
        self._close()
        self._signal(signal.SIGKILL)
        ending = exit_status_of(self._reap())
        self._end_orphans()
        if not self.warm.done():
            self.warm.set_result(f"the zygote, while it imported the training function, {ending.cause}")
        if self._zygote is not None:
            self._zygote.workers_lost(f"was lost with its parent process, the zygote, which {ending.cause}")
        self._finish_clear(list(self._clearing))

    def _close(self) -> None:
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._fd)
        self._write_no_more()
        self._loop.remove_reader(self._output)
        self._read_output()  # as much as a pipe can hold
        self._log(self._lines.rest())
        self._control.close()
        os.close(self._output)
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()

    def _read_output(self) -> None:
        """What imports print, and what the zygote prints when it crashes."""
        try:
            data = os.read(self._output, _RECEIVE_BYTES)
        except BlockingIOError:
            return
        if data:
            self._log(self._lines.feed(data))
        else:
            self._loop.remove_reader(self._output)

    def _log(self, lines: bytes) -> None:
        if lines and self._zygote is not None:
            self._zygote.spawner_output(lines.decode("utf-8", "replace").rstrip("\n"))

    def _end_orphans(self) -> None:
        """As a subreaper this process inherits what a killed zygote left; other zygotes are not to be harmed."""
        self._zygotes.processes.discard(self)
        if self._zygotes.adopts_orphans:
            end_children(_is_zygote)


def _is_zygote(pid: int) -> bool:
    """Whether a child is a zygote, or about to take a zygote's place: either dies with whom it belongs to."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() in ("hf-zygote", "hf-next-zygote")
    except OSError:
        return False


def _wait_status(returncode: int) -> int:
    return -returncode if returncode < 0 else returncode << 8

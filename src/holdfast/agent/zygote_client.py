"""The agent's end of the zygote: starts it, sends it descriptors, is told of workers' starts and deaths, and ends it.

One process (`zygote.zygote`) is the parent of all workers, forked or cold, so that their deaths, their orphans
and the death of this agent are handled in one place. A zygote that cannot be forked safely is replaced by one
that starts workers cold; one that was killed is replaced by another of its kind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.agent.output import Lines
from holdfast.agent.spawner import Parent
from holdfast.linux.exit_status import exit_status_of
from holdfast.linux.process_killing import end_children
from holdfast.wire.frames import Splitter, encode
from holdfast.wire.messages import Prepare
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
    Kill,
    Load,
    TookOver,
    ToZygote,
    Warm,
)

__all__ = ["ZygoteSpawner"]

_CLEAR_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0
_RECEIVE_BYTES = 64 * 1024
_decoder: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)


class ZygoteSpawner:
    """A `Spawner` by way of a zygote."""

    def __init__(self, parent: Parent, leftovers: list[Path], *, adopts_orphans: bool) -> None:
        """`leftovers` go when this process is killed. `adopts_orphans`: it is a subreaper and has no children but
        these, so it may kill them all."""
        self._parent = parent
        self._adopts_orphans = adopts_orphans
        self._leftovers = [str(path) for path in leftovers]
        self._load: Load | None = None
        self._function_fd = -1
        self._zygote: _ZygoteProcess | None = None
        self._cold_reason: str | None = None

    async def prepare(self, prepare: Prepare, function_fd: int) -> str | None:
        if self._zygote is not None and self._zygote.loaded:
            await self.close()
        self._function_fd = function_fd
        self._load = Load(
            filesystem=prepare.filesystem,
            sys_path=prepare.sys_path,
            environment=prepare.environment,
            preload=prepare.preload,
            fork=prepare.fork,
            leftovers=self._leftovers,
            agent_is_subreaper=self._adopts_orphans,
        )
        self._cold_reason = None if prepare.fork else "the run asks for it"
        await self.ready()
        return self._cold_reason

    def launch(self) -> None:
        """Start a zygote before there is a job, so that it runs when the job arrives."""
        self._zygote = _ZygoteProcess(self._parent, self._adopts_orphans)

    async def ready(self) -> None:
        assert self._load is not None, "a generation was started before the job was prepared"
        while True:
            if self._zygote is None or self._zygote.lost:
                await self.close()
                self.launch()
            assert self._zygote is not None
            if not self._zygote.loaded:
                self._zygote.loaded = True
                self._zygote.send(self._load, [os.dup(self._function_fd)])
            reason = await asyncio.shield(self._zygote.warm)
            if reason is None:
                return
            if not self._load.fork:
                raise RuntimeError(f"No worker can be started on this node: {reason}")
            self._cold_reason = reason
            self._parent.spawner_output(f"Workers are started cold from now on: {reason}.")
            self._load = msgspec.structs.replace(self._load, fork=False)
            await self.close()

    def spawn(self, assignment: Assignment, worker_fds: WorkerFds) -> None:
        assert self._zygote is not None
        self._zygote.send(Fork(assignment=assignment, listens=worker_fds.listen is not None), worker_fds.fds)

    async def clear(self, generation: int) -> None:
        if self._zygote is None or self._zygote.lost:
            return
        try:
            async with asyncio.timeout(_CLEAR_TIMEOUT_S):
                await self._zygote.clear(generation)
        except TimeoutError:
            self._parent.spawner_output(f"The zygote did not clear generation {generation} in time and is replaced.")
            await self._zygote.end(0.0)

    def add_imports(self, modules: list[str]) -> None:
        if self._zygote is not None and self._load is not None and self._load.fork and not self._zygote.lost:
            self._zygote.send(AddImports(modules=modules))

    async def close(self) -> None:
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            await zygote.end(_CLOSE_TIMEOUT_S)


class _ZygoteProcess:
    """One zygote process and the socket to it."""

    def __init__(self, parent: Parent, adopts_orphans: bool) -> None:
        self._adopts_orphans = adopts_orphans
        self._loop = asyncio.get_running_loop()
        self._parent = parent
        self._splitter = Splitter()
        self._lines = Lines()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._cleared: asyncio.Future[None] | None = None
        self.warm: asyncio.Future[str | None] = self._loop.create_future()
        self.loaded = False
        self.lost = False
        self._reaped = False
        self._control, theirs = socket.socketpair()
        self._output, output = os.pipe()
        with theirs:
            command = [sys.executable, "-m", "holdfast.zygote.zygote", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        os.close(output)
        self._pid = self._process.pid
        self._control.setblocking(False)
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._control, self._receive)
        self._loop.add_reader(self._output, self._read_output)

    def send(self, order: ToZygote, fds: list[int] | None = None) -> None:
        """Send one order; descriptors are closed here once they are on their way."""
        self._unsent.append((memoryview(encode(order)), fds or []))
        if len(self._unsent) == 1:
            self._write()

    async def clear(self, generation: int) -> None:
        if self._cleared is None:
            self._cleared = self._loop.create_future()
            self.send(Kill(generation=generation))
        await asyncio.shield(self._cleared)

    async def end(self, patience_s: float) -> None:
        """Have it kill everything and exit; kill it after `patience_s`. Orphans that become our children are killed
        too."""
        if not self.lost:
            self.send(Dismiss())
        self._close()
        if not self._reaped:
            self._signal(signal.SIGTERM)
            pidfd = os.pidfd_open(self._pid)
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

    # ------------------------------------------------------------------ the process

    def _signal(self, number: int) -> None:
        """It is a child of this process and was not waited for, so the pid is its own."""
        os.kill(self._pid, number)

    def _reap(self) -> int:
        """Wait for its end; gives the status as of wait(2)."""
        self._reaped = True
        if self._process.pid == self._pid:
            return _wait_status(self._process.wait())
        return os.waitpid(self._pid, 0)[1]

    def _replace_process(self, pid: int) -> None:
        """The process that was started here has ended, and the one that takes its place is now a child of ours."""
        self._process.wait() if self._process.pid == self._pid else os.waitpid(self._pid, 0)
        self._pid = pid

    # ------------------------------------------------------------------ the socket

    def _write(self) -> None:
        while self._unsent and not self.lost:
            data, fds = self._unsent[0]
            try:
                sent = socket.send_fds(self._control, [data], fds) if fds else self._control.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._control, self._write)
                return
            except OSError:
                break  # its death comes by way of the reader
            for fd in fds:
                os.close(fd)
            self._unsent[0] = (data[sent:], [])
            if sent == len(data):
                self._unsent.popleft()
        if not self.lost:
            self._loop.remove_writer(self._control)

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
            self._parent.worker_started(message.generation, message.rank, message.pid)
        elif isinstance(message, Died):
            self._parent.worker_died(message.generation, message.rank, message.status, killed=message.killed)
        elif isinstance(message, Cleared):
            self._finish_clear()
        else:
            assert isinstance(message, TookOver)
            self._replace_process(message.pid)

    def _finish_clear(self) -> None:
        if self._cleared is not None and not self._cleared.done():
            self._cleared.set_result(None)
        self._cleared = None

    def _handle_death(self) -> None:
        """The zygote is dead, and by PR_SET_PDEATHSIG so are its workers; what those had started is now a child of
        ours, and is killed."""
        self._close()
        self._signal(signal.SIGKILL)
        ending = exit_status_of(self._reap())
        self._end_orphans()
        if not self.warm.done():
            self.warm.set_result(f"the zygote, while it imported the training function, was {ending.cause}")
        self._parent.workers_lost(f"lost with its parent process, the zygote, which was {ending.cause}")
        self._finish_clear()

    def _close(self) -> None:
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
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
        if lines:
            self._parent.spawner_output(lines.decode("utf-8", "replace").rstrip("\n"))

    def _end_orphans(self) -> None:
        """As a subreaper this process inherits what a killed zygote left."""
        if self._adopts_orphans:
            end_children()


def _wait_status(returncode: int) -> int:
    return -returncode if returncode < 0 else returncode << 8

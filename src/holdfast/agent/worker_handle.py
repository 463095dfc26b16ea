"""One worker in the agent's care: its connection, its output, its last words, and how it ended.

Reads are driven by the event loop and never block. A `Finished` counts only with the exit that follows it; an
error that the worker told itself is passed on at once. `generation` keeps the wards of a generation together.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from holdfast.agent.output import RankLog
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.errors import WireError
from holdfast.linux import signal_state
from holdfast.linux.exit_status import exit_status_of
from holdfast.wire.frames import Decoder, Splitter, encode
from holdfast.wire.messages import Exited, Finished, ToWorker, WorkerMessage
from holdfast.worker.stdio import DUMP_SIGNAL, WorkerFds

__all__ = ["WorkerHandle"]

_RECEIVE_BYTES = 256 * 1024
_DUMP_LIMIT_S = 5.0
"""A process that hangs inside the kernel never dumps; one on a machine that has too much to do takes a while."""
_DUMP_QUIET_S = 0.03
_decoder: Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)

_OnMessage = Callable[["WorkerHandle", WorkerMessage], None]


class WorkerHandle:
    """The agent's end of one worker. `worker_fds` are the worker's ends, to be handed over."""

    def __init__(self, generation: int, rank: int, log: RankLog, listen_fd: int | None, on_message: _OnMessage) -> None:
        self.generation = generation
        self.rank = rank
        self.log = log
        self.pid: int | None = None
        self.alive = True
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._splitter = Splitter()
        self._finished: Finished | None = None
        self._told_error = False
        self._dump = bytearray()
        self._dumped = asyncio.Event()
        self._unsent = bytearray()
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        self._pipes: dict[int, str] = {}
        ends = [theirs.detach()]
        for name in ("stdout", "stderr", "dump"):
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            self._pipes[reading] = name
            ends.append(writing)
        self.worker_fds = WorkerFds.from_fds([*ends, *([] if listen_fd is None else [listen_fd])])
        self._loop.add_reader(self._connection, self._listen)
        for fd in self._pipes:
            self._loop.add_reader(fd, self._read, fd)

    # ------------------------------------------------------------------ talking

    def tell(self, message: ToWorker) -> None:
        """Send to the worker; a dead one does not mind, a slow one is waited for without blocking."""
        if not self.alive:
            return
        empty = not self._unsent
        self._unsent += encode(message)
        if empty:
            self._pump()

    def pause(self) -> None:
        """Leave what it sends in the socket: the controller lags, and so the worker shall wait."""
        if self.alive:
            self._loop.remove_reader(self._connection)

    def resume(self) -> None:
        if self.alive:
            self._loop.add_reader(self._connection, self._listen)

    async def dump_stacks(self) -> str:
        """The Python stacks of all its threads, taken in C, whatever it is doing; "" if it gives none in time."""
        if not self.alive or self.pid is None:
            return ""
        self._dump.clear()
        before = signal_state.blocking(self.pid, DUMP_SIGNAL)
        with suppress(ProcessLookupError):
            # In this order: a stopped process deals with the signal first, and so shows where it was.
            os.kill(self.pid, DUMP_SIGNAL)
            os.kill(self.pid, signal.SIGCONT)
        with suppress(TimeoutError):
            async with asyncio.timeout(_DUMP_LIMIT_S):
                while await self._is_dumping() or signal_state.has_to_handle(self.pid, DUMP_SIGNAL, before):
                    continue
        for fd in [fd for fd, name in self._pipes.items() if name == "dump"]:
            while self._read(fd):
                continue
        return self._dump.decode("utf-8", "replace")

    async def _is_dumping(self) -> bool:
        """Whether any more of a dump comes within a moment."""
        self._dumped.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_DUMP_QUIET_S):
                await self._dumped.wait()
        return self._dumped.is_set()

    # ------------------------------------------------------------------ the end

    def ended(self, status: int, *, out_of_memory: bool) -> Finished | Exited | None:
        """The process is gone: what to tell the controller, or None where the worker told it itself."""
        self.drain()
        if self._told_error:
            return None
        if self._finished is not None and status == 0:
            return self._finished
        ending = exit_status_of(status, out_of_memory=out_of_memory)
        return self._exited(ending.cause, ending.code, ending.signal)

    def lost(self, why: str) -> Exited | None:
        """The process is gone, and nobody can say how."""
        self.drain()
        return None if self._told_error else self._exited(why, None, None)

    def drain(self) -> None:
        """Read what the dead process left behind, and close everything."""
        if not self.alive:
            return
        while self._listen():
            continue
        for fd in list(self._pipes):
            while self._read(fd):
                continue
        self.alive = False
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()
        for fd in list(self._pipes):
            self._close_pipe(fd)
        self.log.finish_lines()
        if self._dump:
            self.log.note(self._dump.decode("utf-8", "replace"))

    def _exited(self, cause: str, code: int | None, number: int | None) -> Exited:
        return Exited(
            generation=self.generation,
            rank=self.rank,
            cause=cause,
            traceback=self._dump.decode("utf-8", "replace") or None,
            code=code,
            signal=number,
            last_lines=list(self.log.tail),
        )

    # ------------------------------------------------------------------ listening

    def _listen(self) -> bool:
        """Read once from the connection; whether there was anything."""
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._connection)
            return False
        try:
            for body in self._splitter.feed(data):
                self._hear(_decoder.decode(body))
        except (WireError, *DECODE_ERRORS) as error:
            # Someone in that process wrote to our descriptor; what follows cannot be trusted.
            self.log.note(f"holdfast: rank {self.rank} broke its connection to the agent: {error}")
            self._loop.remove_reader(self._connection)
            self._connection.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def _hear(self, message: WorkerMessage) -> None:
        if isinstance(message, Finished):
            self._finished = message
        elif isinstance(message, Exited):
            self._told_error = True
            for fd in list(self._pipes):
                while self._read(fd):
                    continue
            if message.traceback:
                self.log.note(message.traceback)
            self._on_message(self, msgspec.structs.replace(message, last_lines=list(self.log.tail)))
        else:
            self._on_message(self, message)

    def _read(self, fd: int) -> bool:
        """Read once from a pipe; whether there was anything."""
        try:
            data = os.read(fd, _RECEIVE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(fd)
            return False
        if self._pipes[fd] == "dump":
            self._dump += data
            self._dumped.set()
        else:
            self.log.feed(self._pipes[fd], data)
            if self.log.writer.is_behind and self._loop.remove_reader(fd):
                # The worker waits in `print` until the disk has taken what it wrote; `drain` reads the rest if it dies.
                self.log.writer.when_caught_up(lambda: self._read_again(fd))
        return True

    def _read_again(self, fd: int) -> None:
        if fd in self._pipes:
            self._loop.add_reader(fd, self._read, fd)

    def _close_pipe(self, fd: int) -> None:
        if self._pipes.pop(fd, None) is not None:
            self._loop.remove_reader(fd)
            os.close(fd)

    def _pump(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._pump)
            return
        except OSError:
            self._unsent.clear()  # it died; the spawner will say so
        self._loop.remove_writer(self._connection)

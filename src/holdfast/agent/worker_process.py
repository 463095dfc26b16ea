"""The agent's end of a worker that is a process: its connection, its output, and its stack dumps.

Reads are driven by the event loop and never block. How it ended is decided in `worker_handle`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.agent.output import RankLog
from holdfast.agent.worker_handle import OnMessage, WorkerHandle
from holdfast.core.decode_errors import DECODE_ERRORS
from holdfast.core.events import WorkerExited
from holdfast.errors import WireError
from holdfast.linux import signal_state
from holdfast.wire.frames import Decoder, Splitter, encode
from holdfast.wire.messages import ToWorker, WorkerMessage
from holdfast.worker.stdio import DUMP_SIGNAL, WorkerFds

__all__ = ["WorkerProcess"]

_RECEIVE_BYTES = 256 * 1024
_DUMP_LIMIT_S = 5.0
"""A process that hangs inside the kernel never dumps; one on a machine that has too much to do takes a while."""
_DUMP_QUIET_S = 0.03
_CALLER = f'  File "{Path(__file__).parents[1] / "worker/bootstrap.py"}"'
_decoder: Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


def _without_callers(text: str) -> str:
    """A dump without the frames of Holdfast's own that called the user's function, which come after it."""
    kept: list[str] = []
    is_caller = False
    for line in text.splitlines():
        if not line.startswith("  File"):
            is_caller = False
        elif line.startswith(_CALLER) and line.endswith(" in _call"):
            is_caller = True
        if not is_caller:
            kept.append(line)
    return "\n".join(kept)


class WorkerProcess(WorkerHandle):
    """A worker behind a socket and pipes. `worker_fds` are the worker's ends, to be handed over."""

    def __init__(self, rank: int, log: RankLog, listen_fd: int | None, on_message: OnMessage) -> None:
        super().__init__(rank, on_message)
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._splitter = Splitter()
        self._dump = bytearray()
        self._dumped = asyncio.Event()
        self._unsent = bytearray()
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        self._fd = self._connection.fileno()
        """What the event loop is given: it takes much longer to find a socket."""
        self._writes = False
        """Whether the event loop waits until the connection takes more."""
        self._pipes: dict[int, str] = {}
        ends = [theirs.detach()]
        for name in ("stdout", "stderr", "dump"):
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            self._pipes[reading] = name
            ends.append(writing)
        self.worker_fds = WorkerFds.from_fds([*ends, *([] if listen_fd is None else [listen_fd])])
        self._loop.add_reader(self._fd, self._receive)
        for fd in self._pipes:
            self._loop.add_reader(fd, self._read, fd)

    # ------------------------------------------------------------------ sending

    def send(self, message: ToWorker) -> None:
        """Queue a message for the worker, without blocking; dropped if it is dead."""
        if not self.alive:
            return
        empty = not self._unsent
        self._unsent += encode(message)
        if empty:
            self._write()

    def pause(self) -> None:
        """Stop reading its messages, because the controller lags: it blocks when its socket is full."""
        if self.alive:
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if self.alive:
            self._loop.add_reader(self._fd, self._receive)

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
        return _without_callers(self._dump.decode("utf-8", "replace"))

    async def _is_dumping(self) -> bool:
        """Whether more of a dump arrives within `_DUMP_QUIET_S`."""
        self._dumped.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_DUMP_QUIET_S):
                await self._dumped.wait()
        return self._dumped.is_set()

    # ------------------------------------------------------------------ the end

    def drain(self) -> None:
        """Read what the dead process left behind, and close everything."""
        if not self.alive:
            return
        while self._receive():
            continue
        for fd in list(self._pipes):
            while self._read(fd):
                continue
        self.alive = False
        self._loop.remove_reader(self._fd)
        self._write_no_more()
        self._connection.close()
        for fd in list(self._pipes):
            self._close_pipe(fd)
        self._log.finish_lines()
        if self._dump:
            self._log.note(self._dump.decode("utf-8", "replace"))

    def tell(self, text: str) -> None:
        self._log.tell(text)

    def close_log(self) -> None:
        self._log.close()

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._log.tail)

    @property
    def _stacks(self) -> str | None:
        return self._dump.decode("utf-8", "replace") or None

    # ------------------------------------------------------------------ receiving

    def _receive(self) -> bool:
        """Read once from the connection; whether there was anything."""
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
            return False
        try:
            for body in self._splitter.feed(data):
                self._receive_message(_decoder.decode(body))
        except (WireError, *DECODE_ERRORS) as error:
            # Someone in that process wrote to our descriptor; what follows cannot be trusted.
            self._log.note(f"holdfast: rank {self.rank} broke its connection to the agent: {error}")
            self._loop.remove_reader(self._fd)
            self._connection.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def _receive_message(self, message: WorkerMessage) -> None:
        if isinstance(message, WorkerExited):
            for fd in list(self._pipes):
                while self._read(fd):
                    continue
            if message.failure.traceback:
                self._log.note(message.failure.traceback)
        self.receive(message)

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
            self._log.feed(self._pipes[fd], data)
            if self._log.writer.is_behind and self._loop.remove_reader(fd):
                # The worker waits in `print` until the disk has taken what it wrote; `drain` reads the rest if it dies.
                self._log.writer.when_caught_up(lambda: self._read_again(fd))
        return True

    def _read_again(self, fd: int) -> None:
        if fd in self._pipes:
            self._loop.add_reader(fd, self._read, fd)

    def _close_pipe(self, fd: int) -> None:
        if self._pipes.pop(fd, None) is not None:
            self._loop.remove_reader(fd)
            os.close(fd)

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._fd, self._write)
            self._writes = True
            return
        except OSError:
            self._unsent.clear()  # it died; the spawner will say so
        self._write_no_more()

    def _write_no_more(self) -> None:
        if self._writes:
            self._loop.remove_writer(self._fd)
            self._writes = False

"""The next zygote: a child of the zygote that imports what workers imported by themselves, and takes its place later.

An import may take any time, and a zygote that imports can neither fork nor kill. So the zygote goes on serving while
this child, forked from it, imports one module after the other. Between two generations, when there are no workers, the
child takes over the connection to the agent, and the old zygote ends; the agent, as the nearest subreaper, becomes its
parent. A module that starts threads, or kills the process that imports it, costs only the child: another one is forked,
which leaves that module out.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from holdfast.wire.frames import receive, send
from holdfast.worker.job_loader import import_quietly
from holdfast.zygote.fork_safety import one_thread_each, unsafe_reason

__all__ = ["NextZygote", "import_until_takeover", "wait_for_reparenting"]

_PARENT_GONE_S = 0.0005


class _Import(msgspec.Struct, frozen=True, tag=True):
    """Import these, in this order; each is answered by itself. Only one such order is under way at a time: were both
    sides to write at once, each could wait for the other to read."""

    modules: list[str]


class _Imported(msgspec.Struct, frozen=True, tag=True):
    module: str
    is_safe: bool
    """Whether this process may still be forked."""


class _TakeOver(msgspec.Struct, frozen=True, tag=True):
    """The zygote is about to end; answered with the same message, after which it does."""

    untried: list[str] = []
    """Modules that it was told of and that were not tried yet."""


_orders: msgspec.msgpack.Decoder[_Import | _TakeOver] = msgspec.msgpack.Decoder(_Import | _TakeOver)
_answers: msgspec.msgpack.Decoder[_Imported | _TakeOver] = msgspec.msgpack.Decoder(_Imported | _TakeOver)


class NextZygote:
    """The zygote's end of its child. Its connection is read only when it is readable."""

    def __init__(self, pid: int, connection: socket.socket, modules: Sequence[str]) -> None:
        self.pid = pid
        self.connection = connection
        self.spoiled = False
        """Whether it is of no use any more: dead, or not to be forked from."""
        self._queued: list[str] = []
        self._ordered: list[str] = []
        self._done: list[str] = []
        self.import_modules(modules)

    def import_modules(self, modules: Sequence[str]) -> None:
        self._queued.extend(modules)
        self._order_next()

    def _order_next(self) -> None:
        if self._queued and not self._ordered:
            self._ordered, self._queued = self._queued, []
            with suppress(BrokenPipeError, ConnectionResetError):  # its death comes as a signal
                send(self.connection, _Import(self._ordered))

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything that it was told to."""
        return not self._queued and not self._ordered and not self.spoiled

    def receive(self) -> None:
        """Read one answer."""
        with suppress(ConnectionResetError):
            answer = receive(self.connection, _answers)
            if isinstance(answer, _Imported) and answer.is_safe:
                self._ordered = self._ordered[1:]
                self._done.append(answer.module)
                self._order_next()
                return
        self.spoiled = True

    def hand_over(self, untried: list[str]) -> bool:
        """Have it take over, with the modules that are yet to be tried; False if it died instead."""
        with suppress(BrokenPipeError, ConnectionResetError):
            send(self.connection, _TakeOver(untried))
            if isinstance(receive(self.connection, _answers), _TakeOver):
                return True
        self.spoiled = True
        return False

    def end(self) -> list[str]:
        """Kill it. Gives what a successor should import: all but the module that it was at."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()
        return [*self._done, *self._ordered[1:], *self._queued]


def import_until_takeover(connection: socket.socket, prepare_to_fork: Callable[[], None]) -> list[str]:
    """In the child: import what comes, and return when it is time to be the zygote, with the modules that are yet to be
    tried. `prepare_to_fork` prepares the process for being forked; it is called after the last module of each order."""
    while (order := receive(connection, _orders)) is not None:
        if isinstance(order, _TakeOver):
            return order.untried
        for module in order.modules:
            with one_thread_each():
                import_quietly(module)
            if module == order.modules[-1]:
                prepare_to_fork()
            send(connection, _Imported(module, unsafe_reason(f"Importing {module}") is None))
    os._exit(0)


def wait_for_reparenting(connection: socket.socket, former: int) -> None:
    """In the child: let the former zygote end, and return when it has. This process must not die with it."""
    send(connection, _TakeOver())
    connection.close()
    while os.getppid() == former:
        time.sleep(_PARENT_GONE_S)

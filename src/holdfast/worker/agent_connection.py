"""A worker's connection to its agent: frames out, answers in, and which of this rank's checkpoints are still pending.

Synchronous and without a thread: what the agent sends is read when there is a reason to. `session` uses it; the agent
is at the other end of the socket pair, and if it dies, so does this process.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from holdfast.core.commands import AnnounceCheckpoint, AnnouncePreemption, AnnounceSettled, HoldReports
from holdfast.core.events import WorkerWaited
from holdfast.core.records import Preemption
from holdfast.errors import WireError
from holdfast.wire.frames import receive, send
from holdfast.wire.messages import (
    BuffersReserved,
    Collect,
    Collected,
    CollectiveKind,
    ReserveBuffers,
    ToWorker,
    WorkerMessage,
)
from holdfast.worker.job import Assignment

__all__ = ["AgentConnection"]

_DECODER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_AGENT_GONE = "The agent of this worker is gone, and so the run has moved on without it: this process must end."


class AgentConnection:
    """One worker's connection in one generation. The session's lock guards it."""

    def __init__(self, connection: socket.socket, assignment: Assignment) -> None:
        self._connection = connection
        self._generation = assignment.generation
        self._rank = assignment.rank
        self._sending = threading.Lock()
        """A thread of `report_sender` may send while the training function's thread waits for an answer."""
        self._sequence = 0
        self._collected: Collected | None = None
        self._reserved: BuffersReserved | None = None
        self.newest = assignment.checkpoint
        """The newest committed checkpoint that this rank knows of."""
        self.pending: list[int] = []
        """The reports whose checkpoints, of this rank, are neither committed nor given up yet; oldest first."""
        self.hold: int | None = None
        """The number of the first report in which this rank has to stay (`HoldReports.number`); None: there is none."""
        self.announced: AnnounceCheckpoint | None = None
        """The last checkpoint of this generation that was committed or given up."""
        self.committed = 0
        """The newest report whose checkpoint is known to be committed."""
        self.preemption: Preemption | None = None
        """Which nodes of the generation are about to be taken away, as far as this rank was told."""
        self.standing: AnnounceSettled | None = None
        """How the checkpoints of all ranks stand that this rank waits for, as it was told last."""
        self.settled = 0
        """Every checkpoint up to this report, of whichever ranks, is known to be committed or given up."""

    def send(self, message: WorkerMessage) -> None:
        try:
            with self._sending:
                send(self._connection, message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WireError(_AGENT_GONE) from error

    def drain(self) -> None:
        """Read what has arrived, without waiting."""
        while self._has_arrived():
            self._handle(self._receive())

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Until `condition` is true; False if it is not within `timeout_s`. Meanwhile the controller knows that this
        rank waits."""
        self.drain()
        if condition():
            return True
        with self.waiting():
            return self.read_until(condition, timeout_s)

    @contextmanager
    def waiting(self, until_report: int | None = None, until_validated: bool = False) -> Iterator[None]:
        """Let the controller know that this rank waits, and have it say in `standing` how all checkpoints up to a
        report stand."""
        self.standing = None
        self.send(
            WorkerWaited(
                generation=self._generation,
                rank=self._rank,
                waiting=True,
                until_report=until_report,
                until_validated=until_validated,
            )
        )
        yield
        self.send(WorkerWaited(generation=self._generation, rank=self._rank, waiting=False))

    def read_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Read the agent's messages until `condition` is true; False if it is not within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition() and self._arrives_before(deadline):
            self._handle(self._receive())
        return condition()

    @property
    def is_settled(self) -> bool:
        """Whether what this rank waits for is known to have come."""
        return self.standing is not None and self.standing.settled

    @property
    def none_lags(self) -> bool:
        """Whether every rank is known to have made the report up to which this one waits."""
        return self.standing is not None and not self.standing.lagging

    def wait_for_pending(self, timeout_s: float | None = None) -> bool:
        """Until every checkpoint of this rank is committed or given up; False if that was not in time."""
        return self.wait_until(lambda: not self.pending, timeout_s)

    def _arrives_before(self, deadline: float | None) -> bool:
        if deadline is None:
            return True
        poll = select.poll()  # unlike select() it takes any descriptor
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def collect(self, kind: CollectiveKind, data: Any) -> Any:
        """Meet all ranks in a collective; what the controller answers."""
        self._sequence += 1
        self.send(
            Collect(generation=self._generation, rank=self._rank, sequence=self._sequence, kind=kind, data=data),
        )
        while self._collected is None or self._collected.sequence != self._sequence:
            self._handle(self._receive())
        answer, self._collected = self._collected, None
        return answer.data

    def reserve_buffers(self, size_bytes: int, count: int) -> int:
        """Ask the agent for so many snapshot buffers of this size: how many there may be."""
        self._reserved = None
        self.send(ReserveBuffers(size_bytes=size_bytes, count=count))
        while self._reserved is None:
            self._handle(self._receive())
        return self._reserved.count

    def _has_arrived(self) -> bool:
        """Whether a read would not block: there are bytes, or the connection has ended."""
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _receive(self) -> ToWorker:
        message = receive(self._connection, _DECODER)
        if message is None:
            raise WireError(_AGENT_GONE)
        return message

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Collected):
            if message.generation == self._generation:
                self._collected = message
            return
        if isinstance(message, AnnouncePreemption):
            if message.generation == self._generation:
                self.preemption = message.preemption
            return
        if isinstance(message, BuffersReserved):
            self._reserved = message
            return
        if isinstance(message, AnnounceSettled):
            if (message.generation, message.rank) == (self._generation, self._rank):
                self.standing = message
                if message.settled:
                    self.settled = max(self.settled, message.until_report)
            return
        if isinstance(message, HoldReports):
            if message.generation == self._generation:
                self.hold = message.number
            return
        if message.ticket.generation != self._generation:
            return
        self.announced = message
        number = message.ticket.number
        if message.name is not None:
            self.newest = message.name
            self.committed = number
        # Not those before it: where an agent was lost, a later one may be given up while an earlier one is uploaded.
        self.pending = [one for one in self.pending if one != number]

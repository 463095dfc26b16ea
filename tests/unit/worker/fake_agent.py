"""The agent's end of a worker's socket pair, in a thread: records messages, and answers as a test says."""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.core.commands import AnnounceCheckpoint, AnnounceSettled
from holdfast.core.events import Ticket, WorkerWaited
from holdfast.wire import frames
from holdfast.wire.messages import (
    BuffersReserved,
    Collect,
    Collected,
    ReserveBuffers,
    ToWorker,
    WorkerMessage,
    WorkerReport,
)
from holdfast.worker.job import Assignment
from holdfast.worker.session import Session

__all__ = ["FakeAgent", "make_assignment"]

_PATIENCE_S = 60
"""For what comes at once on any machine that is not overwhelmed."""


def make_assignment(**changes: Any) -> Assignment:
    fields: dict[str, Any] = {
        "generation": 3,
        "rank": 0,
        "local_rank": 0,
        "node_rank": 0,
        "world_size": 1,
        "local_world_size": 1,
        "node_count": 1,
        "master_address": "127.0.0.1",
        "master_port": 1,
        "restart_count": 0,
        "max_restarts": 0,
        "checkpoint": None,
        "storage": "/nowhere/run",
        "experiment": "run",
        "trial_id": "run",
        "trial_dir": "/nowhere/run",
        "work_dir": "/nowhere/work",
        "staging_dir": "/nowhere/staging",
        "temp_dir": "/nowhere/tmp",
        "error_file": "",
        "change_directory": False,
    }
    return Assignment(**(fields | changes))


class FakeAgent:
    """`announce_as` is the name that each reported checkpoint is committed under at once; without it nothing announces
    until `announce` is called. Collectives are answered at once with what was sent; who waits for all checkpoints is
    told of `lagging` ranks, or when every checkpoint was announced. Workers get as many buffers as they ask for, but no
    more than `buffers_max`."""

    def __init__(
        self, *, announce_as: str | None = None, announces: bool = False, lagging: tuple[int, ...] = (), **changes: Any
    ) -> None:
        self.socket, theirs = socket.socketpair()
        self.assignment = make_assignment(**changes)
        self.session = Session(theirs, self.assignment)
        self._theirs = theirs
        self._announces = announces or announce_as is not None
        self._announce_as = announce_as
        self.lagging = lagging
        self.buffers_max = 2
        self._lock = threading.Lock()
        self._pending: set[int] = set()
        self._question: int | None = None
        self.heard: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self._theirs.close()
        self._thread.join(_PATIENCE_S)
        self.socket.close()

    def next(self, kind: type[Any] = WorkerReport) -> Any:
        """The next message of this kind; others before it are dropped."""
        while True:
            message = self.heard.get(timeout=_PATIENCE_S)
            if isinstance(message, kind):
                return message

    def announce(self, number: int, name: str | None) -> None:
        with self._lock:
            self._pending.discard(number)
            self.send(AnnounceCheckpoint(ticket=Ticket(self.assignment.generation, number), name=name))
            self._answer()

    def _answer(self) -> None:
        if self._question is None:
            return
        settled = not self.lagging and not any(number <= self._question for number in self._pending)
        self.send(
            AnnounceSettled(
                generation=self.assignment.generation,
                rank=self.assignment.rank,
                until_report=self._question,
                lagging=self.lagging,
                settled=settled,
            )
        )

    def send(self, message: ToWorker) -> None:
        frames.send(self.socket, message)

    def _listen(self) -> None:
        # A worker may go without having read all that we sent: the kernel calls that a reset.
        with suppress(ConnectionResetError, BrokenPipeError):
            self._converse()

    def _converse(self) -> None:
        decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
        while (message := frames.receive(self.socket, decoder)) is not None:
            if isinstance(message, WorkerReport) and message.report.checkpoint:
                self._pending.add(message.report.number)
                if self._announces:
                    self.announce(message.report.number, self._announce_as)
            if isinstance(message, WorkerWaited):
                with self._lock:
                    self._question = message.until_report
                    self._answer()
            if isinstance(message, Collect):
                generation = self.assignment.generation
                self.send(Collected(generation=generation, sequence=message.sequence, data=message.data))
            if isinstance(message, ReserveBuffers):
                self.send(BuffersReserved(count=min(message.count, self.buffers_max)))
            self.heard.put(message)

"""One worker as its group sees it: whether it lives, what it sent last, and how it ended.

A `WorkerFinished` counts only with the exit code 0 that follows it; a failure that the worker reports itself is passed
on at once. `worker_process` adds the connection and the pipes of a real process; `worker_group` holds the workers of a
generation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from holdfast.core.events import WorkerExited, WorkerFinished
from holdfast.core.records import WorkerFailure
from holdfast.linux.exit_status import exit_status_of
from holdfast.wire.messages import ToWorker, WorkerMessage
from holdfast.worker.stdio import WorkerFds

__all__ = ["OnMessage", "WorkerHandle"]


class WorkerHandle(ABC):
    """The agent's end of one worker. Used from the agent's event loop."""

    worker_fds: WorkerFds
    """The worker's ends, to be handed over."""

    def __init__(self, rank: int, on_message: OnMessage) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.alive = True
        self._on_message = on_message
        self._finished: WorkerFinished | None = None
        self._sent_failure = False

    def receive(self, message: WorkerMessage) -> None:
        """The worker sent this."""
        if isinstance(message, WorkerFinished):
            self._finished = message
            return
        self._sent_failure = self._sent_failure or isinstance(message, WorkerExited)
        self._on_message(self, message)

    def ended(self, status: int, *, out_of_memory: bool) -> WorkerFinished | WorkerFailure | None:
        """The process is gone: how it ended, or None where the worker has sent its failure itself."""
        self.drain()
        if self._sent_failure:
            return None
        if self._finished is not None and status == 0:
            return self._finished
        ended = exit_status_of(status, out_of_memory=out_of_memory)
        return WorkerFailure(rank=self.rank, cause=ended.cause, traceback=self._stacks, signal=ended.signal)

    def lost(self, why: str) -> WorkerFailure | None:
        """The process is gone, and its wait status is unknown."""
        self.drain()
        if self._sent_failure:
            return None
        return WorkerFailure(rank=self.rank, cause=why, traceback=self._stacks)

    @property
    @abstractmethod
    def last_lines(self) -> tuple[str, ...]:
        """What it last wrote to stderr."""

    @property
    @abstractmethod
    def _stacks(self) -> str | None:
        """The stacks that it dumped, if it did."""

    @abstractmethod
    def send(self, message: ToWorker) -> None:
        """Queue a message for the worker, without blocking; dropped if it is dead."""

    @abstractmethod
    def pause(self) -> None:
        """Stop reading its messages, because the controller lags: it blocks when its socket is full."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    async def dump_stacks(self) -> str:
        """The Python stacks of all its threads; "" if it gives none in time."""

    @abstractmethod
    def drain(self) -> None:
        """Receive what the dead process left behind, and close its connection; it is not `alive` any more."""

    @abstractmethod
    def tell(self, text: str) -> None:
        """Write a line of Holdfast's own to its log and the driver's terminal."""

    @abstractmethod
    def close_log(self) -> None: ...


OnMessage = Callable[[WorkerHandle, WorkerMessage], None]

"""The thread that called `fit()`: it waits for the hub's, answers signals, and in local mode runs the function.

The first Ctrl+C or SIGTERM asks for a clean stop, with a last checkpoint if the function is about to give one; further
ones for a quick stop. Python runs signal handlers in the main thread only, while the kernel may hand a signal to any:
so this one waits on a socket that the signal itself rings.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from holdfast.core.events import StopRequested

__all__ = ["DriverThread", "grace_s"]


def grace_s() -> float:
    """How long a run that is stopped waits for a last checkpoint, if one can be expected (HOLDFAST_GRACE_S)."""
    return float(os.environ.get("HOLDFAST_GRACE_S", "20"))


_Call = Callable[[], None]


class DriverThread:
    """One `fit()`. `put`, `connect`, `stop` and `leave` may be called from any thread, the rest only from its own."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._ringer.setblocking(False)
        self._over = False
        self._busy = False
        self._asked = 0
        self._thread_id = 0
        """Of the thread that answers signals; 0 if none does."""
        self._interrupting = False
        self._lock = threading.RLock()
        """Reentrant, since a signal may come while it is held."""
        self.left_by: BaseException | None = None
        """What is to be raised in the place of the run's outcome."""
        self._post: Callable[[StopRequested], None] | None = None
        self._early: list[StopRequested] = []

    def put(self, call: _Call | None) -> None:
        """Have `serve` make a call; None when the run is over."""
        self._calls.put(call)
        with contextlib.suppress(BlockingIOError):  # so full a socket will wake it all the same
            self._ringer.send(b"\0")

    def connect(self, post: Callable[[StopRequested], None]) -> None:
        """From here on the controller can be told to stop; what was asked before is told now."""
        with self._lock:
            self._post = post
            for request in self._early:
                post(request)

    def stop(self, request: StopRequested) -> None:
        """Tell the controller to stop."""
        with self._lock:
            if self._post is not None:
                self._post(request)
            else:
                self._early.append(request)

    def stop_from_hub(self, request: StopRequested) -> None:
        """Tell the controller of this run alone to stop, and get out of the user's function as a signal would. A
        function that runs in another thread than the main one goes on until its next report."""
        self.stop(request)
        if self._busy and self._thread_id:
            self._interrupting = True
            signal.pthread_kill(self._thread_id, signal.SIGINT)

    def leave(self, error: BaseException, why: str) -> None:
        """Stop the run, and have `error` raised out of `fit()` once it is over. From any thread, before that."""
        self.left_by = error
        self.stop_from_hub(StopRequested(why=why))

    def serve(self) -> None:
        """Until the run is over."""
        while not self._over:
            # Raised by `signals` to get out of the user's function; that the run shall end is told already.
            with contextlib.suppress(KeyboardInterrupt):
                self._serve_one()

    def _serve_one(self) -> None:
        try:
            call = self._calls.get_nowait()
        except queue.Empty:
            self._bell.recv(4096)
            return
        if call is None:
            self._over = True
            return
        self._busy = True
        try:
            call()
        finally:
            self._busy = False

    @contextlib.contextmanager
    def signals(self, stop: Callable[[StopRequested], None]) -> Iterator[None]:
        """Answer Ctrl+C and SIGTERM for the time of the block, where Python lets this thread do so: `stop` is called,
        with `force` from the second time on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wakeup = signal.set_wakeup_fd(self._ringer.fileno(), warn_on_full_buffer=False)

        def handle(number: int, frame: FrameType | None) -> None:
            if self._interrupting:  # by `stop_from_hub`, which has told the controller
                self._interrupting = False
                if self._busy:
                    raise KeyboardInterrupt
                return
            self._asked += 1
            why = "Ctrl+C" if number == signal.SIGINT else signal.Signals(number).name
            stop(StopRequested(why=why, force=self._asked > 1, grace_s=0.0 if self._busy else grace_s()))
            if self._busy:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        self._thread_id = threading.get_ident()
        try:
            yield
        finally:
            self._thread_id = 0
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)

    def close(self) -> None:
        self._bell.close()
        self._ringer.close()

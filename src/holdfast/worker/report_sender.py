"""A rank's reports on their way to the agent, in order, while a thread may still store the checkpoint of one of them.

That thread is there only where the user gives `report` an upload function and asks for `CheckpointUploadMode.ASYNC`.
The reports made meanwhile are held back: they count after a checkpoint that is not there yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from holdfast.errors import WireError
from holdfast.wire.messages import WorkerReport

__all__ = ["ReportSender"]


class ReportSender:
    """Sends reports in the order in which they were made. Used from the training function's thread."""

    def __init__(self, send: Callable[[WorkerReport], None], on_failure: Callable[[], None]) -> None:
        """`on_failure` is called before the error of an upload is raised: its report came without a checkpoint."""
        self._send = send
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._uploading = False
        self._held_back: list[WorkerReport] = []
        self._error: BaseException | None = None

    def send(self, message: WorkerReport) -> None:
        if not self._uploading:  # only this thread begins an upload
            self._send(message)
            return
        with self._lock:
            if self._uploading:
                self._held_back.append(message)
            else:
                self._send(message)

    def send_uploaded(self, upload: Callable[[], WorkerReport], without: WorkerReport) -> None:
        """Call `upload` in a thread and send the report that it gives; if it raises, the one `without` a checkpoint,
        and the error comes out of the next `check` or `finish`."""
        self.finish()
        self._uploading = True
        self._thread = threading.Thread(target=self._work, args=(upload, without), name="holdfast-upload", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what an upload has raised."""
        error, self._error = self._error, None
        if error is not None:
            self._on_failure()
            raise error

    def finish(self) -> None:
        """Wait until everything is sent; raises what the upload has raised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self.check()

    def abandon(self) -> None:
        """Send nothing more: the training function has failed."""
        with self._lock:
            self._held_back.clear()
            self._uploading = False
            self._thread = None

    def _work(self, upload: Callable[[], WorkerReport], without: WorkerReport) -> None:
        try:
            message = upload()
        except BaseException as error:  # noqa: BLE001  whatever the user's function raises is raised in its thread
            self._error, message = error, without
        with self._lock:
            if self._uploading:
                with suppress(WireError):  # the agent is gone; the training function's thread finds that too
                    for one in (message, *self._held_back):
                        self._send(one)
                self._held_back.clear()
                self._uploading = False

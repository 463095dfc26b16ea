"""What agents that do not see the storage give each other, over a network that lags, breaks, tears and is slow.

`snapshot_fetch` and the buffers at both ends are the real ones; this stands for the server and its client.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.sim.process import Process

from holdfast.agent.snapshot_server import ServedSnapshots
from holdfast.errors import Unavailable
from holdfast.storage.store import Entry

__all__ = ["Neighbour", "SnapshotServer"]

_LAG_S = 0.02
_TIMEOUT_S = 10.0
_SLOW_S = 60.0
_BREAKS = _TEARS = 0.06
_IS_SLOW = 0.03


class SnapshotServer:
    """Where one node gives what it has in memory of one run's checkpoints."""

    def __init__(self, process: Process, files: ServedSnapshots, port: int) -> None:
        self.process, self.buffers, self.port = process, files._buffers, port
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


class Neighbour:
    """A checkpoint in the memory of another node."""

    def __init__(self, process: Process, server: SnapshotServer, token: str) -> None:
        """`process` is the one that asks."""
        self._process, self._server, self._token = process, server, token
        self._sim = process.sim

    def list(self) -> list[Entry]:
        self._wait()
        return [Entry(path, size_bytes) for path, size_bytes in self._server.buffers.stored_files(self._token).items()]

    def read_into(self, key: str, target: memoryview, on_block: Callable[[memoryview], None]) -> None:
        """Half of the file, and a while later the rest, whatever the buffer holds by then."""
        self._wait()
        self._sim.moment("fetching")
        fd, start, size_bytes, _ = self._server.buffers.open_file(self._token, key)
        try:
            for run in self._sim.runs:
                run.checkers.gives(self._server.process.name, self._token, key, os.pread(fd, size_bytes, start))
            half = size_bytes // 2
            target[:half] = os.pread(fd, half, start)
            self._wait()
            target[half:] = os.pread(fd, size_bytes - half, start + half)
        finally:
            os.close(fd)
        if self._sim.happens(_TEARS):
            target[0] ^= 1
        on_block(target)

    def close(self) -> None:
        """Nothing is held."""

    def _wait(self) -> None:
        """The bytes are on their way; `Unavailable` if they do not come."""
        self._process.sleep(_SLOW_S if self._sim.happens(_IS_SLOW) else self._sim.delay_s(_LAG_S))
        server = self._server.process
        if server.is_alive and not server.is_running:
            self._process.sleep(_TIMEOUT_S)
            raise Unavailable("It is silent.")
        if not server.is_alive or not self._server.is_open or self._sim.happens(_BREAKS):
            raise Unavailable("The connection broke.")

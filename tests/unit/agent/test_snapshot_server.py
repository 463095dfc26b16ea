"""What an agent gives other nodes of its memory: nothing of it is left open."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.buffers import Buffers, SnapshotMemory
from holdfast.agent.snapshot_server import ServedSnapshots
from holdfast.core.checkpoint_types import MemoryFile, Snapshot
from holdfast.core.events import Ticket
from holdfast.errors import Unavailable
from holdfast.streaming import messages as m
from holdfast.worker.snapshot_buffer import HEADER_BYTES, SnapshotBuffer, new_seal


def _held(buffers: Buffers, data: bytes) -> None:
    """Have a snapshot of the committed checkpoint `t` in memory."""
    path = buffers.of_slot(0)[0]
    memory = SnapshotBuffer.open(path)
    memory.reserve(len(data))
    memory.data[: len(data)] = data
    memory.seal = seal = new_seal()
    memory.close()
    buffers.hold(Ticket(1, 1), Snapshot(buffer=path, seal=seal, files=[MemoryFile("model", 0, len(data))]))
    buffers.release(Ticket(1, 1), "t")


def _inodes(buffers: Buffers) -> set[tuple[int, int]]:
    """What tells the memory of these buffers from that of other tests."""
    found = [os.fstat(one.fd) for one in buffers._buffers.values()]
    return {(one.st_dev, one.st_ino) for one in found}


def _open_files(inodes: set[tuple[int, int]]) -> int:
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            status = path.stat()
            found += (status.st_dev, status.st_ino) in inodes
    return found


def test_a_file_is_opened_as_far_as_it_was_asked_for() -> None:
    async def test() -> None:
        buffers = Buffers(1, SnapshotMemory(1 << 20))
        _held(buffers, b"weights")
        files = ServedSnapshots(buffers, asyncio.get_running_loop())
        opened = await asyncio.to_thread(files.open, m.Read(key=b"t/model", start=2, length=3))
        assert os.pread(opened.fd, opened.size_bytes, opened.start) == b"igh" and opened.start == HEADER_BYTES + 2
        assert opened.is_intact()
        opened.close()
        inodes = _inodes(buffers)
        buffers.close()
        assert _open_files(inodes) == 0

    asyncio.run(test())


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_an_answer_that_comes_too_late_leaves_no_memory_open(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = asyncio.run_coroutine_threadsafe

    class Late:
        """An answer that is there a moment after it was given up."""

        def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
            self._answer: concurrent.futures.Future[Any] = ask(coroutine, loop)

        def result(self, timeout: float) -> None:
            self._answer.result(timeout)
            raise TimeoutError

        def cancel(self) -> bool:
            return self._answer.cancel()

    async def test() -> None:
        buffers = Buffers(1, SnapshotMemory(1 << 20))
        _held(buffers, b"weights")
        files = ServedSnapshots(buffers, asyncio.get_running_loop())
        opened = await asyncio.to_thread(files.open, m.Read(key=b"t/model"))
        opened.close()
        inodes = _inodes(buffers)
        before = _open_files(inodes)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", Late)
        with pytest.raises(Unavailable):
            await asyncio.to_thread(files.open, m.Read(key=b"t/model"))
        await asyncio.sleep(0)  # what the event loop is about to forget
        gc.collect()
        assert _open_files(inodes) == before
        buffers.close()

    asyncio.run(test())

"""The storage servers of this process: started when an agent says that it does not see a run's directory.

One process for each directory (`streaming.server`), so that no event loop has to move files. It listens at the
addresses at which the hub does, with a port of its own (HOLDFAST_STORAGE_PORT; otherwise any that is free), and is
started again, at the same port, if it dies.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from holdfast.core.backoff import backoff_s
from holdfast.storage.run_secret import make_secret
from holdfast.streaming.server import Listening, Settings
from holdfast.wire.messages import StorageServed

__all__ = ["StorageServers"]

_PORT_VARIABLE = "HOLDFAST_STORAGE_PORT"
_END_S = 5.0
_RESTART_S = (0.1, 5.0)
"""The first pause before a server that died is started again, and the longest."""
_log = logging.getLogger(__name__)


class StorageServers:
    """Used from the hub's event loop."""

    def __init__(self, hosts: Callable[[], Sequence[str]]) -> None:
        """`hosts` gives the addresses at which the hub listens."""
        self._hosts = hosts
        self._started: dict[tuple[str, ...], asyncio.Future[StorageServed]] = {}
        """By directory and addresses."""
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, root: str) -> StorageServed:
        """Where this directory is served, or why not."""
        hosts = list(self._hosts())
        key = (root, *hosts)
        if key not in self._started:
            loop = asyncio.get_running_loop()
            started = self._started[key] = loop.create_future()
            task = loop.create_task(self._run(root, hosts, started))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        answer = await asyncio.shield(self._started[key])
        if answer.error:
            self._started.pop(key, None)  # another agent may be luckier
        return answer

    async def close(self) -> None:
        """End all servers."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, root: str, hosts: list[str], started: asyncio.Future[StorageServed]) -> None:
        """Keep a server running until cancelled. Whatever happens, who waits for it is answered."""
        port = os.environ.get(_PORT_VARIABLE, "0")
        settings = Settings(root=root, key=make_secret(), hosts=hosts, port=int(port) if port.isdigit() else 0)
        failures = 0
        why = "the driver is about to end."
        try:
            while True:
                try:
                    port_now, ended = await _serve_once(settings, started)
                except OSError as error:
                    port_now, ended = 0, f"its storage server cannot be started: {error}."
                if not started.done():
                    why = ended
                    return
                settings = msgspec.structs.replace(settings, port=port_now or settings.port)
                failures += 1
                _log.warning("The storage server of %s has ended (%s), and is started again.", root, ended.rstrip("."))
                await asyncio.sleep(backoff_s(failures, *_RESTART_S))
        finally:
            if not started.done():
                started.set_result(StorageServed(root=root, error=why))


async def _serve_once(settings: Settings, started: asyncio.Future[StorageServed]) -> tuple[int, str]:
    """Run a server to its end: the port at which it listened, and how it ended; 0 and why if it did not listen."""
    process = await _start(settings)
    try:
        assert process.stdout is not None
        listening = _read(await process.stdout.readline())
        if listening.error:
            return 0, listening.error
        if not started.done():
            started.set_result(StorageServed(root=settings.root, port=listening.port, key=settings.key))
        return listening.port, f"exit code {await process.wait()}"
    finally:
        await _end(process)


async def _start(settings: Settings) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "holdfast.streaming.server",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl+C is the driver's
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings) + b"\n")
    return process


def _read(line: bytes) -> Listening:
    if not line:
        return Listening(error="its storage server ended at once.")
    return msgspec.json.decode(line, type=Listening)


async def _end(process: asyncio.subprocess.Process) -> None:
    """A server ends when its standard input does."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.wait()
            return
    process.kill()
    await process.wait()

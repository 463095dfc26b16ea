"""The detached actor that has the driver of a caller outside the cluster as its child process. Runs on the head.

It keeps what the driver prints, and how it ended, for callers that come and go: each asks for what follows the position
up to which it has read. Everything that it says to a caller is plain data.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

__all__ = ["JOB_FILE", "OUTCOME_FILE", "DriverActor"]

JOB_FILE, OUTCOME_FILE = "job", "outcome"
"""In the directory that a driver process is given: what it shall do, and what came of it."""
_KEPT_CHARACTERS = 1 << 22
_POLL_S = 10.0
"""A caller's question waits so long for an answer that is not empty."""
_ASKED_S = 60.0
"""How long an outcome is kept at least once a caller has asked, which may start another driver."""
_TAKEN_OUTCOME_S = 5.0
"""The same once one has taken it; others may be reading it."""
_PROGRAM = "import sys, importlib; importlib.import_module(sys.argv[1]).main(sys.argv[2])"
"""A `__main__` without a file, so that the working directory is the user's code."""


class DriverActor:
    """Made into an actor by `client.ClusterDriver`. All its methods run on one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._fingerprint = ""
        self._pieces: deque[tuple[int, int, str]] = deque()
        """What the driver printed: position, 1 or 2, text."""
        self._position = 0
        self._kept_characters = 0
        self._outcome: bytes | None = None
        self._why = ""
        self._keep_s = 0.0
        """How long an outcome that no caller has taken is kept."""
        self._has_ended = False
        self._was_taken = False
        self._end: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def state(self, fingerprint: str) -> tuple[str, bool]:
        """Its driver is "running", or has "ended" with an outcome that nobody has taken, or there is none (""); and
        whether it was given the same function."""
        if self._end is not None:
            self._end_after(_ASKED_S)
        if self._task is None or self._was_taken:
            return "", True
        return ("ended" if self._has_ended else "running"), fingerprint == self._fingerprint

    async def start(self, module: str, job: bytes, fingerprint: str, keep_s: float) -> None:
        """Start a driver, unless one runs: another caller may have been quicker. What came of the last is dropped; what
        comes of this one is kept for `keep_s`, until a caller takes it, and at least as long as callers that wait need
        to read it."""
        if self._task is not None and not self._has_ended:
            return
        if self._end is not None:
            self._end.cancel()
        self._end, self._has_ended, self._was_taken, self._outcome, self._why = None, False, False, None, ""
        self._pieces.clear()
        self._kept_characters = 0
        self._fingerprint, self._keep_s = fingerprint, keep_s
        self._task = asyncio.get_running_loop().create_task(self._drive(module, job))

    async def read(self, position: int) -> tuple[int, list[tuple[int, str]], bool, bytes | None, str]:
        """What was printed after `position`: where that ends, the pieces of text with their descriptors, whether the
        driver has ended, its outcome, and why it left none."""
        if position >= self._position and not self._has_ended:
            self._changed.clear()
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
        found = [(fd, text) for at, fd, text in self._pieces if at >= position]
        return self._position, found, self._has_ended, self._outcome, self._why

    async def taken(self) -> None:
        """A caller has read the outcome."""
        self._was_taken = True
        self._end_after(_TAKEN_OUTCOME_S)

    async def stop(self, number: int) -> None:
        """Pass a caller's signal on."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    # ------------------------------------------------------------ the driver

    async def _drive(self, module: str, job: bytes) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="holdfast-driver-") as name:
                (Path(name) / JOB_FILE).write_bytes(job)
                del job
                self._outcome, self._why = await self._run(module, Path(name))
        except OSError as error:
            self._why = f"it could not be started: {error}"
        self._has_ended = True
        self._end_after(max(self._keep_s, _TAKEN_OUTCOME_S))
        self._changed.set()

    async def _run(self, module: str, directory: Path) -> tuple[bytes | None, str]:
        command = [sys.executable, "-c", _PROGRAM, module, str(directory)]
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,  # its end tells the driver that this actor is gone
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            cwd=directory,
            start_new_session=True,
        )
        await asyncio.gather(self._forward(process.stdout, 1), self._forward(process.stderr, 2), process.wait())
        code = process.returncode or 0
        try:
            return (directory / OUTCOME_FILE).read_bytes(), ""
        except FileNotFoundError:
            return None, f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"

    async def _forward(self, stream: Any, fd: int) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while data := await stream.read(1 << 16):
            if text := decoder.decode(data):
                self._keep(fd, text)

    def _keep(self, fd: int, text: str) -> None:
        self._pieces.append((self._position, fd, text))
        self._position += len(text)
        self._kept_characters += len(text)
        while self._kept_characters > _KEPT_CHARACTERS:
            self._kept_characters -= len(self._pieces.popleft()[2])
        self._changed.set()

    def _end_after(self, delay_s: float) -> None:
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(delay_s, _end_this_actor)


def _environment() -> dict[str, str]:
    """The driver connects to this actor's cluster like any other driver of this machine."""
    import ray

    own = {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "HOLDFAST_ENGINE": "ray",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **own}


def _end_this_actor() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor)

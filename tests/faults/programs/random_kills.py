"""Kills workers and agents of a run at random moments, and counts the kills."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.faults.programs import processes
from tests.faults.programs.sandbox import Sandbox

__all__ = ["RandomKills"]

_QUIET_S = 0.25
"""When no worker has announced a step for so long, one of those seen last is killed."""


class RandomKills:
    """Kills one process at about every fifth step that `jobs.announce` reports, until `stop`.

    After `kills` of them it opens the gate at which the workers wait before their last step.
    """

    def __init__(self, sandbox: Sandbox, kills: int, *, seed: int, agents_every: int = 0) -> None:
        self.path = f"\0holdfast-{uuid.uuid4().hex}"  # no file: its path might be too long for a socket
        self.kills = 0
        self._sandbox = sandbox
        self._wanted = kills
        self._agents_every = agents_every
        self._random = random.Random(seed)
        self._killed: deque[int] = deque(maxlen=8)
        """Who was killed last: the dying may take a while, and are not killed twice."""
        self._over = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(_QUIET_S)
        self._thread = threading.Thread(target=self._work, name="kills")
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()

    def _work(self) -> None:
        seen: list[int] = []
        while not self._over.is_set() and self.kills < self._wanted:
            try:
                pid, _, _ = json.loads(self._socket.recv(4096))
                seen = [*seen[-3:], pid]
                due = self._random.random() < 0.2
            except TimeoutError:
                due = True
            if due and seen:
                self._over.wait(self._random.random() * 0.004)  # anywhere within a step, a report or a commit
                self._kill(self._random.choice(seen))
        self._sandbox.open_gate()

    def _kill(self, pid: int) -> None:
        target = pid
        if self._agents_every and (self.kills + 1) % self._agents_every == 0:
            zygote = processes.parent_of(pid)
            target = (processes.parent_of(zygote) if zygote else None) or pid
        if target in self._killed:
            return
        if end(target, self._sandbox.marker, lambda found: "zygote" in found or "holdfast.agent" in found):
            self._killed.append(target)
            self.kills += 1


def end(pid: int, marker: str, fits: Callable[[str], bool]) -> bool:
    """SIGKILL a process of this test; a pid that was reused by another process is left alone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        with suppress(OSError):
            ours = marker.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if ours and fits(processes.command_of(pid)):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                return True
        return False
    finally:
        os.close(fd)

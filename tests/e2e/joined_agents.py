"""Helpers of the tests with agents that join by themselves, on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["free_port", "joined_agent"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def joined_agent(port: int, name: str, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """An agent of this name, which workers find in TEST_AGENT; ended at the end of the block."""
    command = [sys.executable, "-m", "holdfast", "agent", "--join", f"holdfast://127.0.0.1:{port}"]
    agent = subprocess.Popen(
        [*command, "--agent-id", name, "--dial", "60", *options],
        env={**os.environ, "TEST_AGENT": name, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield agent
    finally:
        agent.terminate()
        agent.communicate()

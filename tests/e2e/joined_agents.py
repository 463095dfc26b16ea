"""Helpers of the tests with agents that join by themselves, on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["agent_without", "can_hide", "free_port", "joined_agent"]

_UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
"""Mount namespaces need root, or a namespace of users."""
_HIDE = 'mount -t tmpfs none "$0" && exec "$@"'


def can_hide() -> bool:
    """Whether mount namespaces are permitted here."""
    command = [*_UNSHARE, "sh", "-c", _HIDE, "/mnt", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


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


@contextmanager
def agent_without(
    storage: Path, port: int, name: str, *, slots: int = 1, hide: bool = True, cache: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """An agent that sees an empty directory where the driver has its storage; `cache`: its own, as on another host."""
    environment = {} if cache is None else {"HOLDFAST_LOCAL_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "holdfast", "agent", "--join", f"127.0.0.1:{port}", "--agent-id", name, "--stay"]
    if hide:
        command = [*_UNSHARE, "sh", "-c", _HIDE, str(storage), *command]
    agent = subprocess.Popen(
        [*command, "--slots", str(slots), "--dial", "60", "--drain-deadline", "1"],
        env={**os.environ, **environment},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield agent
    finally:
        agent.terminate()
        agent.wait(60)

"""Identify the process that writes a checkpoint, so that others can find out whether it is still alive.

A process is named by host, boot, PID namespace, PID and start time: a PID alone is reused after a while, and
means nothing on another machine, after a reboot, or in another container. `reservation` records it; `repair`
and `reserve` check it.
"""

from __future__ import annotations

import functools
import hashlib

import msgspec

from holdfast.runtime import Runtime, current

__all__ = ["ProcessIdentity", "describe", "is_dead", "machine_id", "this_process"]


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One process on any machine. Fields are empty or 0 where the system does not provide them."""

    host: str
    boot_id: str = ""
    pid_namespace: str = ""
    pid: int
    started_ticks: int = 0


def this_process() -> ProcessIdentity:
    """The calling process."""
    runtime = current()
    return _identify(runtime, runtime.pid())


@functools.lru_cache(maxsize=8)
def _identify(runtime: Runtime, pid: int) -> ProcessIdentity:
    """A process does not change while it is asked who it is; a forked child has another PID."""
    host, boot_id, namespace = runtime.machine()
    found = runtime.process_status(pid)
    return ProcessIdentity(
        host=host, boot_id=boot_id, pid_namespace=namespace, pid=pid, started_ticks=found[1] if found else 0
    )


def is_dead(writer: ProcessIdentity) -> bool | None:
    """Whether that process is gone for good; None where this process cannot know (another host, boot or
    container)."""
    if not writer.boot_id or (writer.host, writer.boot_id, writer.pid_namespace) != current().machine():
        return None
    if not writer.started_ticks:
        return None
    found = current().process_status(writer.pid)
    if found is None:
        return True
    state, started_ticks = found
    return state in ("Z", "X") or started_ticks != writer.started_ticks


def describe(writer: ProcessIdentity) -> str:
    """`host:pid`, for people and for the manifest."""
    return f"{writer.host}:{writer.pid}"


def machine_id() -> str:
    """A short name for this host, boot and PID namespace: processes that can see each other have the same one."""
    return hashlib.sha256("\0".join(current().machine()).encode()).hexdigest()[:12]

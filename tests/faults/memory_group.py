"""A memory control group with a limit, for tests of what happens when memory runs out; version 1 or 2."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.faults.programs import processes

__all__ = ["MemoryGroup", "memory_group"]

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


class MemoryGroup:
    """`limit` is a group with a limit; `inner`, where processes go, is a group below it without one."""

    def __init__(self, limit: Path, limit_bytes: int) -> None:
        self.limit = limit
        self.inner = limit / "inner"
        self.inner.mkdir()
        is_v1 = (limit / "memory.limit_in_bytes").exists()
        (limit / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_bytes))

    def enter(self) -> None:
        """Move the calling process; for `preexec_fn`."""
        (self.inner / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        pids = [int(line) for line in (self.inner / "cgroup.procs").read_text().split()]
        processes.signal_all(pids, 9)
        processes.wait_gone(*pids)
        processes.wait_until(lambda: not (self.inner / "cgroup.procs").read_text().split(), "an empty control group")
        self.inner.rmdir()
        self.limit.rmdir()


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Skips the test where this user may make no such group."""
    name = f"holdfast-test-{secrets.token_hex(4)}"
    for mount in (_V1, _V2):
        path = mount / name
        try:
            path.mkdir()
        except OSError:
            continue
        if (path / "memory.limit_in_bytes").exists() or _delegates_memory(path):
            group = MemoryGroup(path, limit_bytes)
            try:
                yield group
            finally:
                group.remove()
            return
        path.rmdir()
    pytest.skip("no memory control group can be made here: that needs root and a writable /sys/fs/cgroup")


def _delegates_memory(path: Path) -> bool:
    try:
        (path / "cgroup.subtree_control").write_text("+memory")
    except OSError:
        return False
    return (path / "memory.max").exists()

"""Available memory of this node, and the number of OOM kills.

Limits come from control groups, version 1 (`memory.limit_in_bytes`) and 2 (`memory.max`, `memory.high`), this process's
own group and every group above it: the limit of a pod or batch job is usually set some levels up. Both
functions take the root of the file tree, so that tests can give them the files of another machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["OomKills", "available_bytes"]

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Group:
    """The memory control group of this process, as a directory below a mounted hierarchy."""

    mount: Path
    path: Path
    version: int

    def with_ancestors(self) -> Iterator[Path]:
        """This group and every group above it that is visible here."""
        path = self.path
        while path != self.mount:
            yield path
            path = path.parent
        yield self.mount


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that is free for use, on this machine and within the limits of all control groups above this process."""
    free = _meminfo_available_bytes(root)
    for group in _memory_groups(root):
        for path in group.with_ancestors():
            headroom = _headroom_v2(path) if group.version == 2 else _headroom_v1(path)
            if headroom is not None:
                free = min(free, headroom)
    return max(0, free)


class OomKills:
    """The number of OOM kills in the control group that this process is in when this is made, or on this machine where
    groups do not count them. The counter rises before the process gets its signal."""

    def __init__(self, root: Path = _ROOT) -> None:
        names = {1: "memory.oom_control", 2: "memory.events"}
        files = [group.path / names[group.version] for group in _memory_groups(root)]
        counting = (file for file in files if "oom_kill" in _fields(file))
        self._file = next(counting, root / "proc/vmstat")

    def count(self) -> int:
        return _fields(self._file).get("oom_kill", 0)


def _meminfo_available_bytes(root: Path) -> int:
    return _fields(root / "proc/meminfo").get("MemAvailable:", 0) * 1024


def _headroom_v2(path: Path) -> int | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(path / name)) is not None]
    used = _number(path / "memory.current")
    if not limits or used is None:
        return None
    return min(limits) - used + _fields(path / "memory.stat").get("inactive_file", 0)


def _headroom_v1(path: Path) -> int | None:
    """A group without a limit shows a number near 2**63."""
    statistics = _fields(path / "memory.stat")
    limits = [_number(path / "memory.limit_in_bytes"), statistics.get("hierarchical_memory_limit")]
    known = [limit for limit in limits if limit is not None]
    used = _number(path / "memory.usage_in_bytes")
    if not known or used is None:
        return None
    # Inactive page cache counts as used, but can be reclaimed at once.
    return min(known) - used + statistics.get("total_inactive_file", statistics.get("inactive_file", 0))


def _memory_groups(root: Path) -> list[_Group]:
    """The groups that limit this process's memory: one, or two where both versions are mounted."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2 if not controllers else 0
        for mount_root, mount in _hierarchies(mounts, version):
            found.append(_Group(root / mount, root / mount / _below(path, mount_root), version))
    return found


def _hierarchies(mounts: list[str], version: int) -> Iterator[tuple[str, str]]:
    """(root, mount point) of every mounted memory hierarchy of this version; see proc(5)."""
    for line in mounts:
        fields = line.split()
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        is_v1 = kind == "cgroup" and "memory" in options.split(",")
        if (version == 1 and is_v1) or (version == 2 and kind == "cgroup2"):
            yield fields[3], fields[4].lstrip("/")


def _below(path: str, mount_root: str) -> PurePosixPath:
    """The group's path below its mount. A container's mount begins at the container's own group; a group outside of
    the mount (`/../..`) cannot be read, and the mount itself is the nearest one above it."""
    with suppress(ValueError):
        relative = PurePosixPath(os.path.normpath(path)).relative_to(mount_root)
        if ".." not in PurePosixPath(path).parts:
            return relative
    return PurePosixPath()


def _number(file: Path) -> int | None:
    """The number in a file; None if the file is missing or holds "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _fields(file: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in file.read_text().splitlines():
            name, *values = line.split()
            if values and values[0].isdigit():
                found[name] = int(values[0])
    return found

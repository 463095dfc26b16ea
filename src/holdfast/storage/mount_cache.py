"""How long a FUSE mount caches names: from its daemon's command line, or as the user set it.

Two FUSE mounts of one bucket do not see each other's exclusive creations, and each may cache names for a while.
`control.lease` waits for that time before it assumes that it is alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError
from holdfast.storage.files import mount_of

__all__ = ["MountCache", "find_mount_cache"]

_VARIABLE = "HOLDFAST_MOUNT_CACHE_S"
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ms|s|m|h|d|)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FLAGS: dict[str, dict[str, str]] = {
    "rclone": {"--dir-cache-time": "5m", "--attr-timeout": "1s"},
    "gcsfuse": {"--stat-cache-ttl": "60s", "--type-cache-ttl": "60s"},
}
"""Each daemon's flags that set how long names are cached, with their defaults."""


class MountCache(NamedTuple):
    """A FUSE mount, and how long it caches names; None where that is unknown."""

    kind: str
    time_s: float | None


def find_mount_cache(directory: Path) -> MountCache | None:
    """The cache of the FUSE mount that holds this directory; None where it is no such mount."""
    mount = mount_of(directory)
    # Without a dot where a container storage driver has mounted it, as that of gcsfuse does.
    if mount is None or mount.kind.partition(".")[0] != "fuse":
        return None
    if given := os.environ.get(_VARIABLE, "").strip():
        try:
            return MountCache(mount.kind, max(0.0, float(given)))
        except ValueError:
            raise ConfigError(f"{_VARIABLE}={given!r} is no number of seconds: write one, such as 5.") from None
    return MountCache(mount.kind, _declared_s(mount.kind.removeprefix("fuse."), mount.point))


def _declared_s(program: str, point: str) -> float | None:
    """The time on the command line of this mount point's daemon, where this process may read it."""
    flags = _FLAGS.get(program)
    if flags is None:
        return None
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="surrogateescape").split("\0")
        except OSError:
            continue
        if Path(arguments[0]).name.startswith(program) and point in arguments and "--config-file" not in arguments:
            times_s = [_seconds(_value(arguments, flag) or default) for flag, default in flags.items()]
            known_s = [time_s for time_s in times_s if time_s is not None]
            return max(known_s) if len(known_s) == len(times_s) else None
    return None


def _value(arguments: list[str], flag: str) -> str | None:
    for number, argument in enumerate(arguments):
        name, sign, value = argument.partition("=")
        if name == flag or f"-{name}" == flag:
            return value if sign else arguments[number + 1]
    return None


def _seconds(text: str) -> float | None:
    found = _DURATION.fullmatch(text)
    # A negative time means for ever.
    return None if found is None or found[1].startswith("-") else float(found[1]) * _UNITS_S[found[2]]

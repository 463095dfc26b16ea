"""How long a mount may show names as they were: what its daemon was told on its command line, or the user says.

Two FUSE mounts of one bucket do not see each other's exclusive creations, and each may keep names it has seen for
a while. `control.lease` waits that out before it believes to be alone. Neighbour: `files.mount_kind`.
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
"""Each daemon's flags that keep names, with their defaults."""


class MountCache(NamedTuple):
    """A FUSE mount, and for how long it shows what others changed meanwhile as it was; None where nothing says."""

    kind: str
    time_s: float | None


def find_mount_cache(directory: Path) -> MountCache | None:
    """The cache of the FUSE mount that holds this directory; None where it is no such mount."""
    mount = mount_of(directory)
    if mount is None or not mount.kind.startswith("fuse."):
        return None
    if given := os.environ.get(_VARIABLE, "").strip():
        try:
            return MountCache(mount.kind, max(0.0, float(given)))
        except ValueError:
            raise ConfigError(f"{_VARIABLE}={given!r} is no number of seconds: write one, such as 5.") from None
    return MountCache(mount.kind, _declared_s(mount.kind.removeprefix("fuse."), mount.point))


def _declared_s(program: str, point: str) -> float | None:
    """What the daemon of this mount point says on its command line, where this process may read that."""
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

"""Where this node's cache lies: session directories, downloaded checkpoints, work directories, compiler caches.

A module of its own, since every worker asks, and needs no store for it.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.storage.private_directory import claim_private_directory

__all__ = ["local_cache_dir", "may_write"]


def local_cache_dir() -> Path:
    """This node's cache: HOLDFAST_LOCAL_CACHE_DIR, RAY_AIR_LOCAL_CACHE_DIR, ~/.cache/holdfast, or, without a
    home that may be written, a directory of this user's below the system's temporary one, which is made at once."""
    for name in ("HOLDFAST_LOCAL_CACHE_DIR", "RAY_AIR_LOCAL_CACHE_DIR"):
        if value := os.environ.get(name, "").strip():
            return Path(os.path.abspath(os.path.expanduser(value)))  # noqa: PTH100, PTH111
    home = os.path.expanduser("~")  # noqa: PTH111
    if os.path.isabs(home) and may_write(Path(home, ".cache", "holdfast")):  # noqa: PTH117
        return Path(home, ".cache", "holdfast")
    import tempfile  # seldom needed, and a tenth of what `import holdfast.train` may cost

    return claim_private_directory(Path(tempfile.gettempdir(), f"holdfast-{os.getuid()}"))


def may_write(directory: Path) -> bool:
    """Whether this user may write to the directory, or make it."""
    while not os.path.exists(directory) and directory != directory.parent:  # noqa: PTH110  pathlib raises EACCES
        directory = directory.parent
    return os.access(directory, os.W_OK | os.X_OK)

"""Where this user's state lies: what must outlive processes, and must not be lost with a cache."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.storage.local_cache import may_write
from holdfast.storage.private_directory import claim_private_directory

__all__ = ["state_dir"]


def state_dir() -> Path:
    """HOLDFAST_STATE_DIR, XDG_STATE_HOME/holdfast, ~/.local/state/holdfast, or, without a home that may be written, a
    directory of this user's below the system's temporary one, which is made at once."""
    if value := os.environ.get("HOLDFAST_STATE_DIR", "").strip():
        return Path(os.path.abspath(os.path.expanduser(value)))  # noqa: PTH100, PTH111
    above = os.environ.get("XDG_STATE_HOME", "").strip() or os.path.expanduser("~/.local/state")  # noqa: PTH111
    if os.path.isabs(above) and may_write(Path(above, "holdfast")):  # noqa: PTH117
        return Path(above, "holdfast")
    import tempfile

    return claim_private_directory(Path(tempfile.gettempdir(), f"holdfast-{os.getuid()}"))

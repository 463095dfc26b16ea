"""Checkpoints without a system: one file, replaced by rank 0."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["load", "save"]


def load(directory: str) -> Path | None:
    """The directory of the last checkpoint, if there is one."""
    kept = Path(directory, "kept")
    return kept if (kept / "state.pt").exists() else None


def save(directory: str, rank: int, write: Callable[[Path], None]) -> None:
    """Replace it."""
    if rank == 0:
        kept = Path(directory, "kept")
        kept.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            write(Path(scratch))
            os.replace(Path(scratch, "state.pt"), kept / "state.pt")  # noqa: PTH105

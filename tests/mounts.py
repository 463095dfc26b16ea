"""File systems for tests marked `hosts`: a small tmpfs that fills up, and a directory that nobody can write to."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["read_only_bind", "tmpfs"]


@contextmanager
def tmpfs(path: Path, size: str = "1m") -> Iterator[Path]:
    """Mount an empty tmpfs of this size at `path`, which is made if it is not there."""
    path.mkdir(exist_ok=True)
    with _mounted(path, "-t", "tmpfs", "-o", f"size={size}", "none"):
        yield path


@contextmanager
def read_only_bind(source: Path, path: Path) -> Iterator[Path]:
    """Show the directory `source` at `path`, read-only for everybody, root included."""
    path.mkdir(exist_ok=True)
    with _mounted(path, "--bind", str(source)):
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        yield path


@contextmanager
def _mounted(path: Path, *options: str) -> Iterator[None]:
    subprocess.run(["mount", *options, path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)

"""The files that the user named for rank 0's output (`RunConfig(log_to_file)`): one file over all generations.

What each generation appends is a file of its own, `logs/generation_000003/output/<name>`, which one agent writes and
nobody else. The user's file is these, joined in order. They only grow, so a user's file that is as long as all of them
together holds all of them: an agent that finds it otherwise joins them again, and looks again afterwards, in case
another has stored something meanwhile. So nothing is lost in whatever order agents come to it, or if one dies.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import NotFound, StorageError
from holdfast.storage.private_directory import make_private_directory
from holdfast.storage.store import Entry, OnBytes, Store

__all__ = ["JoinedOutput", "has_grown", "output_part"]

_GROWTH = 8
_TRIES = 10
"""So often in one turn, while others store more; the next turn goes on."""
_BLOCK_BYTES = 1 << 20
_PART = re.compile(r"logs/generation_[0-9]+/output/(.+)", re.DOTALL)
_log = logging.getLogger(__name__)


def output_part(logs: Path, generation: int, name: str) -> Path:
    """What one generation appends to the user's file `name`; the same below `logs/` in storage."""
    return logs / f"generation_{generation:06d}" / "output" / name


def has_grown(size_bytes: int, stored_bytes: int) -> bool:
    """Whether a file that is still written to has grown enough to be stored again: by an eighth."""
    return size_bytes - stored_bytes > stored_bytes // _GROWTH


class JoinedOutput:
    """Joins the parts that are in storage. Used by `artifact_sync`, by one thread at a time."""

    def __init__(self, logs: Path, cache: Path, names: Collection[str]) -> None:
        """`logs` are this node's; parts of other nodes are kept in `cache`. `names` are the user's files."""
        self._logs = logs
        self._cache = cache
        self._names = sorted(set(names))

    def claims(self, key: str) -> bool:
        """Whether `key` is one of the user's files, or cannot be there beside one."""
        return any(key == one or key.startswith(f"{one}/") or one.startswith(f"{key}/") for one in self._names)

    def store(self, store: Store, on_bytes: OnBytes, *, still_written: bool) -> None:
        """Bring the user's files up to date with the parts in storage. Agents do so that have had rank 0; of what is
        `still_written` only when it has grown by an eighth. Raises `StorageError`."""
        generations = list(self._logs.iterdir()) if self._logs.is_dir() else []
        try:
            for name in self._names:
                if any((generation / "output" / name).is_file() for generation in generations):
                    self._join(store, name, on_bytes, still_written)
        except OSError as error:  # this node's disk is full, or the run is over
            raise StorageError(f"{error.strerror}: {error.filename}") from error

    def _join(self, store: Store, name: str, on_bytes: OnBytes, still_written: bool) -> None:
        for _ in range(_TRIES):
            parts = [one for one in store.list("logs") if (found := _PART.fullmatch(one.key)) and found[1] == name]
            size_bytes, stored_bytes = sum(part.size_bytes for part in parts), _size(store, name)
            if size_bytes == stored_bytes:
                return
            if still_written and size_bytes > stored_bytes > 0 and not has_grown(size_bytes, stored_bytes):
                return
            on_bytes(0)
            make_private_directory(self._cache)
            with tempfile.TemporaryDirectory(dir=self._cache) as directory:
                joined = Path(directory, "joined")
                with joined.open("wb") as file:
                    for part in parts:
                        _append(file, self._find_local(store, part, on_bytes), part.size_bytes)
                store.upload(name, joined, on_bytes)
        _log.debug("%s changed each time that it was joined: the next turn goes on", name)

    def _find_local(self, store: Store, part: Entry, on_bytes: OnBytes) -> Path:
        """A file of this node that begins with what storage has of a part."""
        ours = self._logs / part.key.removeprefix("logs/")
        if ours.is_file():
            return ours  # it only grows, and this agent alone stores it
        theirs = self._cache / part.key
        if not theirs.is_file() or theirs.stat().st_size < part.size_bytes:
            store.download(part.key, theirs, on_bytes)
        return theirs


def _size(store: Store, key: str) -> int:
    try:
        return store.size(key)
    except NotFound:
        return 0


def _append(target: BinaryIO, source: Path, size_bytes: int) -> None:
    with source.open("rb") as file:
        while size_bytes > 0 and (block := file.read(min(size_bytes, _BLOCK_BYTES))):
            target.write(block)
            size_bytes -= len(block)

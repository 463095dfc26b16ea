"""Remember the digests of stored files that this process wrote or hashed.

A digest is valid as long as the file's version (`Store.version`) stays the same; if the version changed, or the storage
has none, the file is read again or not relied on. `upload` uses it before it copies a parent's file, `restore` and
`handle` before they read a checkpoint to verify it. An agent sends what it verified to its workers,
so that they need not read it a second time.

Within the granularity of a filesystem's time stamps (some milliseconds, on old network mounts a second) a change in
place that keeps the size is not noticed; neither is a bit that flipped on the disk, until the file is read again.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import suppress

from holdfast.checkpoint.digest import digest_stored
from holdfast.errors import StorageError
from holdfast.storage.store import Digest, OnBytes, Store

__all__ = ["KnownFiles", "process_wide"]

_LIMIT = 100_000
"""The number of files remembered; the least recently used are dropped."""


class KnownFiles:
    """Digests by file and version. May be used from several threads."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._digests: OrderedDict[str, tuple[str, Digest]] = OrderedDict()

    def digest(self, store: Store, key: str) -> Digest | None:
        """What the file holds now, if that is known without reading it; `NotFound` if it is not there."""
        version = store.version(key)
        return None if version is None else self._find(_location(store, key), version)

    def read_digest(self, store: Store, key: str, on_bytes: OnBytes | None = None) -> Digest:
        """What the file holds now, read only if that is not known; `NotFound` if it is not there."""
        version = store.version(key)
        if version is not None and (known := self._find(_location(store, key), version)) is not None:
            return known
        found = digest_stored(store, key, on_bytes)
        if version is not None and store.version(key) == version:  # nobody wrote to it while it was read
            self.remember(store, key, found, version)
        return found

    def wrote(self, store: Store, key: str, digest: Digest) -> None:
        """This process has just stored a file with this digest under `key`."""
        with suppress(StorageError):
            self.remember(store, key, digest, store.version(key))
            return
        self.remember(store, key, digest, None)

    def remember(self, store: Store, key: str, digest: Digest, version: str | None) -> None:
        """The file had this digest when it had this version; None forgets what was known of it."""
        place = _location(store, key)
        with self._lock:
            self._digests.pop(place, None)
            if version is not None:
                self._digests[place] = (version, digest)
                if len(self._digests) > self._limit:
                    self._digests.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._digests.clear()

    def _find(self, place: str, version: str) -> Digest | None:
        with self._lock:
            known = self._digests.get(place)
            if known is None or known[0] != version:
                return None
            self._digests.move_to_end(place)
            return known[1]


def _location(store: Store, key: str) -> str:
    """Identifies a file whichever `Store.sub` it is accessed through."""
    return store.sub(key).uri


process_wide = KnownFiles()
"""Shared by everything in this process."""


# The lock may have been held by a thread that does not exist in the child.
os.register_at_fork(after_in_child=process_wide._lock._at_fork_reinit)  # type: ignore[attr-defined]

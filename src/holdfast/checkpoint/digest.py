"""Hash stored files, and compare a checkpoint's files with its manifest.

Used by `restore` before it trusts the newest checkpoint, by `verify`, and by `upload` for files that others stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from holdfast.checkpoint import layout
from holdfast.checkpoint.manifest import Manifest
from holdfast.core.checkpoint_types import FileEntry
from holdfast.errors import NotFound
from holdfast.runtime import current
from holdfast.storage.hashing import BLOCK_BYTES, blocks, new_hasher
from holdfast.storage.store import Digest, OnBytes, Store

__all__ = ["DigestOf", "check_files", "digest_stored", "mismatch"]

DigestOf = Callable[[Store, str, OnBytes | None], Digest]
"""Gives the digest of a stored file."""

_buffers = threading.local()


def digest_stored(store: Store, key: str, on_bytes: OnBytes | None = None) -> Digest:
    """Size and BLAKE3 of a stored file; `NotFound` if it is missing."""
    hasher = new_hasher()
    if store.local_root is not None:
        store.size(key)  # NotFound rather than an OSError
        size_bytes = sum(len(block) for block in blocks(store.local_root / key, hasher, on_bytes, buffer=_buffer))
        return Digest(size_bytes, hasher.hexdigest())
    size_bytes = 0
    for block in _remote_blocks(store, key):
        hasher.update(block)
        size_bytes += len(block)
        if on_bytes is not None:
            on_bytes(len(block))
    return Digest(size_bytes, hasher.hexdigest())


def check_files(
    store: Store,
    manifest: Manifest,
    *,
    name: str,
    deep: bool,
    threads: int = 4,
    on_bytes: OnBytes | None = None,
    digest_of: DigestOf | None = None,
) -> list[str]:
    """The problems of a committed checkpoint's files, one sentence each.

    Checks presence and size, and the hash if `deep`. `digest_of` may know a file's digest without reading it
    (`KnownFiles.read_digest`); without it every file is read.
    """
    prefix = layout.key_of(name, "")
    sizes = {entry.key.removeprefix(prefix): entry.size_bytes for entry in store.list(name)}
    problems: list[str] = []
    sound: list[FileEntry] = []
    for entry in manifest.all_files:
        size_bytes = sizes.get(entry.path)
        if size_bytes is None:
            problems.append(f"{entry.path} is missing")
        elif size_bytes != entry.size_bytes:
            problems.append(f"{entry.path} has {size_bytes} bytes instead of {entry.size_bytes}")
        else:
            sound.append(entry)
    if not deep:
        return problems

    def check(entry: FileEntry) -> str | None:
        try:
            return mismatch(entry, (digest_of or digest_stored)(store, prefix + entry.path, on_bytes))
        except NotFound:
            return f"{entry.path} is missing"

    found = current().map_in_threads(check, sound, threads)
    return problems + [problem for problem in found if problem is not None]


def mismatch(entry: FileEntry, found: Digest) -> str | None:
    """What differs between a file and its entry in the manifest, or None."""
    if found.size_bytes != entry.size_bytes:
        return f"{entry.path} has {found.size_bytes} bytes instead of {entry.size_bytes}"
    if found.blake3 != entry.blake3:
        ours, theirs = found.blake3[:12], entry.blake3[:12]
        return f"{entry.path} holds other bytes than were committed (BLAKE3 {ours}… instead of {theirs}…)"
    return None


def _remote_blocks(store: Store, key: str) -> Iterator[bytes]:
    size_bytes = store.size(key)
    for start in range(0, size_bytes, BLOCK_BYTES):
        yield store.get_range(key, start, min(BLOCK_BYTES, size_bytes - start))


def _buffer() -> memoryview:
    """This thread's buffer, reused for each read."""
    if not hasattr(_buffers, "block"):
        _buffers.block = memoryview(bytearray(BLOCK_BYTES))
    block: memoryview = _buffers.block
    return block

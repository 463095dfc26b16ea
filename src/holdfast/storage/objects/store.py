"""Objects in S3, Google Cloud Storage and Azure, by way of obstore: this is the one place that calls it.

A key is an object's name below a prefix. Nothing is ever renamed: an object appears whole when its PUT, or the last
call of its multipart upload, succeeds. Small verbs go through a client that never tries again by itself, so that
`retry` knows of every lost answer; bulk transfers go through one that repeats single parts. `location` says where to
and with what credentials, `client` makes the clients, `transfer` moves what is large, and
`failures` translates errors.

A multipart upload that is cut short leaves invisible parts that some clouds charge for: give the bucket a lifecycle
rule that aborts unfinished uploads.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import obstore

from holdfast.errors import AccessDenied, AlreadyExists, NotFound, StorageError, Unavailable
from holdfast.storage.hashing import HashingSource, size_of
from holdfast.storage.keys import check_key, check_prefix, is_temporary, new_temporary
from holdfast.storage.objects.client import connect
from holdfast.storage.objects.failures import RAISED, NoBucket, translate
from holdfast.storage.objects.location import Location, parse
from holdfast.storage.objects.transfer import part_bytes_for, put_parts, ranges
from holdfast.storage.store import Digest, Entry, OnBytes, Source
from holdfast.storage.transfer import receive

__all__ = ["ObjectStore", "open_objects"]

_MIB = 1024 * 1024
_STREAM_BYTES = 4 * _MIB
_RANGED_FROM_BYTES = 64 * _MIB
_COPY_LIMIT_BYTES = 5 * 1024**3
_BEYOND_END = re.compile(r"status code: 416|Wanted range starting at")


@dataclass(slots=True)
class _Shared:
    """What a store and its `sub` views have together: the clients and what was learnt about the server."""

    location: Location
    verbs: Any
    bulk: Any
    ranged_downloads: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    exclusive: bool | None = None
    obeys_ranges: bool = True


def open_objects(uri: str) -> ObjectStore:
    """The store at an `s3://`, `gs://`, `az://` or `abfs://` URI; `location` documents parameters and variables."""
    location = parse(uri, os.environ)
    return ObjectStore(location, ranged_downloads=not location.own_endpoint)


class ObjectStore:
    """A Store in a bucket, below a prefix."""

    def __init__(self, location: Location, ranged_downloads: bool) -> None:
        verbs = connect(location, max_retries=0, timeout_s=60, idle_timeout_s=60)
        bulk = connect(location, max_retries=3, timeout_s=24 * 3600, idle_timeout_s=180)
        self._shared = _Shared(location, verbs, bulk, ranged_downloads)
        self._prefix = location.prefix

    def __repr__(self) -> str:
        return f"ObjectStore({self.uri!r})"

    @property
    def uri(self) -> str:
        return self._shared.location.uri(self._prefix)

    @property
    def local_root(self) -> Path | None:
        return None

    @property
    def exclusive(self) -> bool:
        with self._shared.lock:
            if self._shared.exclusive is None:
                self._shared.exclusive = self._probe()
            return self._shared.exclusive

    def put(self, key: str, data: bytes) -> None:
        with self._translated(key):
            obstore.put(self._shared.verbs, self._path(key), data, use_multipart=False)

    def create(self, key: str, data: bytes) -> None:
        if not self.exclusive:
            self._refuse_existing(key)
            self.put(key, data)
            return
        with self._translated(key):
            obstore.put(self._shared.verbs, self._path(key), data, mode="create")

    def get(self, key: str) -> bytes:
        with self._translated(key):
            return bytes(obstore.get(self._shared.verbs, self._path(key)).bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length <= 0:
            self.size(key)  # an absent key is told of even so
            return b""
        if not self._shared.obeys_ranges:
            return self._cut(key, start, length)
        with self._translated(key):
            try:
                return bytes(obstore.get_range(self._shared.verbs, self._path(key), start=start, length=length))
            except RAISED as error:
                text = str(error)
                if _BEYOND_END.search(text):
                    return b""
                if "non-partial" not in text:
                    raise
        # Some servers send the range under status 200, which obstore takes for the whole object.
        self._shared.obeys_ranges = False
        return self._cut(key, start, length)

    def size(self, key: str) -> int:
        with self._translated(key):
            return obstore.head(self._shared.verbs, self._path(key))["size"]

    def version(self, key: str) -> str | None:
        with self._translated(key):
            tag = obstore.head(self._shared.verbs, self._path(key))["e_tag"]
        return None if tag is None or tag.startswith("W/") else tag  # a weak tag promises no equal bytes

    def children(self, prefix: str = "") -> list[str]:
        root = self._root(prefix)
        with self._translated(prefix):
            found = obstore.list_with_delimiter(self._shared.verbs, root or None)["common_prefixes"]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found})

    def list(self, prefix: str = "") -> list[Entry]:
        root = self._root(prefix)
        skip = len(self._prefix) + 1 if self._prefix else 0
        with self._translated(prefix):
            pages = obstore.list(self._shared.verbs, root or None, chunk_size=1000)
            found = [Entry(meta["path"][skip:], meta["size"]) for page in pages for meta in page]
        return sorted(_without_markers(found, prefix))

    def delete(self, keys: Iterable[str]) -> None:
        doomed = [(key, self._path(key)) for key in keys]
        if not doomed:
            return
        try:
            with self._translated(doomed[0][0]):
                obstore.delete(self._shared.verbs, [path for _, path in doomed])
        except (AccessDenied, Unavailable):
            raise
        except StorageError:
            # An absent key stops a bulk deletion on some clouds, and some servers know none: one by one, then.
            for key, path in doomed:
                self._delete_one(key, path)

    def copy(self, source: str, target: str) -> None:
        origin, path = self._path(source), self._path(target)
        if source == target:
            self.size(source)  # S3 copies no object onto itself
            return
        try:
            with self._translated(source):
                obstore.copy(self._shared.bulk, origin, path)
        except (NotFound, AccessDenied, Unavailable):
            raise
        except StorageError:
            # S3 refuses to copy more than this in one request; asking for the size first would cost every copy.
            if self.size(source) <= _COPY_LIMIT_BYTES:
                raise
            self._copy_through(source, target)

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        path, part_bytes = self._path(key), part_bytes_for(size_of(source))
        sent = HashingSource(source, on_bytes, part_bytes)
        parts = iter(sent)
        first = next(parts, memoryview(b""))
        if len(first) < part_bytes:
            with self._translated(key):
                obstore.put(self._shared.bulk, path, first, use_multipart=False)
            return sent.digest()
        self._send(key, chain([first], parts), part_bytes)
        digest = sent.digest()
        # Some servers of one's own hash the whole object to answer this.
        if not self._shared.location.own_endpoint and self.size(key) != digest.size_bytes:
            raise Unavailable(f"{self._show(key)} was stored with another size than was sent: send it again.")
        return digest

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        with self._translated(key):
            answer = obstore.get(self._shared.bulk, self._path(key))
        return receive(self._incoming(key, answer), target, answer.meta["size"], self._show(key), on_bytes)

    def sub(self, prefix: str) -> ObjectStore:
        view = object.__new__(ObjectStore)
        view._shared = self._shared
        view._prefix = self._root(prefix)
        return view

    def close(self) -> None:
        """obstore's connections close themselves when the last client is let go."""

    # -- names --------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key)}" if self._prefix else check_key(key)

    def _root(self, prefix: str) -> str:
        return "/".join(part for part in (self._prefix, check_prefix(prefix)) if part)

    def _show(self, key: str) -> str:
        return self._shared.location.uri("/".join(part for part in (self._prefix, key) if part))

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except RAISED as error:
            raise translate(error, self._shared.location, self._show(key)) from None

    # -- the long ways ------------------------------------------------------------------------------------------

    def _probe(self) -> bool:
        """Create a key twice: a server that obeys the condition refuses the second time."""
        name = new_temporary()
        path = f"{self._shared.location.prefix}/{name}".lstrip("/")
        with self._translated(name):
            obstore.put(self._shared.verbs, path, b"one", mode="create")
        try:
            with self._translated(name):
                obstore.put(self._shared.verbs, path, b"two", mode="create")
        except AlreadyExists:
            return True
        finally:
            with suppress(StorageError), self._translated(name):
                obstore.delete(self._shared.verbs, path)
        return False

    def _refuse_existing(self, key: str) -> None:
        if self._holds(key):
            raise AlreadyExists(f"{self._show(key)} exists already: choose another name.")

    def _cut(self, key: str, start: int, length: int) -> bytes:
        """A range of an object, read from its beginning."""
        taken, position = bytearray(), 0
        with self._translated(key):
            for block in obstore.get(self._shared.bulk, self._path(key)).stream(min_chunk_size=_MIB):
                taken += memoryview(block)[max(0, start - position) : max(0, start + length - position)]
                position += len(block)
                if position >= start + length:
                    break
        return bytes(taken)

    def _delete_one(self, key: str, path: str) -> None:
        try:
            with self._translated(key):
                obstore.delete(self._shared.verbs, path)
        except (AccessDenied, Unavailable):
            raise
        except StorageError as error:
            if isinstance(error, NoBucket) or self._holds(key):
                raise

    def _holds(self, key: str) -> bool:
        with suppress(NotFound):
            self.size(key)
            return True
        return False

    def _incoming(self, key: str, answer: Any) -> Iterator[Any]:
        """The blocks of an object, in order: from the answer itself, or as several ranges at a time."""
        size_bytes, tag = answer.meta["size"], answer.meta["e_tag"]
        with self._translated(key):
            if self._shared.ranged_downloads and size_bytes >= _RANGED_FROM_BYTES:
                yield from ranges(self._shared.bulk, self._path(key), size_bytes, tag)
            else:
                yield from answer.stream(min_chunk_size=_STREAM_BYTES)

    def _copy_through(self, source: str, target: str) -> None:
        """Copy what the server will not, by way of this process."""
        with self._translated(source):
            answer = obstore.get(self._shared.bulk, self._path(source))
        self._send(target, self._incoming(source, answer), part_bytes_for(answer.meta["size"]))

    def _send(self, key: str, blocks: Iterable[Any], part_bytes: int) -> None:
        """Send an object in parts. What goes wrong in making them is raised as it is: it is not the server's doing."""
        failure: BaseException | None = None

        def made() -> Iterator[Any]:
            nonlocal failure
            try:
                yield from blocks
            except BaseException as error:
                failure = error
                raise

        try:
            put_parts(self._shared.bulk, self._path(key), made(), part_bytes)
        except RAISED as error:
            if failure is not None:
                raise failure from None
            raise translate(error, self._shared.location, self._show(key)) from None


def _without_markers(found: list[Entry], prefix: str) -> Iterator[Entry]:
    """Leave out unfinished probes, and the empty objects by which some tools mark directories."""
    directories = {prefix}
    if any(not entry.size_bytes for entry in found):
        for entry in found:
            parts = entry.key.split("/")
            directories.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    for entry in found:
        if not is_temporary(entry.key.rpartition("/")[2]) and (entry.size_bytes or entry.key not in directories):
            yield entry

"""A store in memory: the whole `Store` protocol over a sorted dict.

Every verb is one request: an effect on the `Bucket`, which happens at one instant. Who makes the store says how
requests are carried out, and so may delay them, lose them, or do them when nobody waits for the answer any more
(`tests.sim.process`). Otherwise they are done at once; `tests/contract` holds this store to the contract as any other.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blake3 import blake3

from holdfast.errors import AlreadyExists, NotFound
from holdfast.storage.keys import check_key, check_prefix
from holdfast.storage.store import Digest, Entry, InMemory, OnBytes, Source, Store

__all__ = ["Bucket", "CarryOut", "MemoryStore"]

_T = TypeVar("_T")
_BLOCK_BYTES = 1024 * 1024


class Bucket:
    """What is stored: bytes by key, each write with a version of its own. Nothing here takes time or fails."""

    def __init__(self, name: str = "bucket", *, exclusive: bool = True) -> None:
        self.name = name
        self.exclusive = exclusive
        self.objects: dict[str, bytes] = {}
        self.versions: dict[str, int] = {}
        self.keys: list[str] = []
        """Sorted."""
        self.last_version = 0

    def write(self, key: str, data: bytes) -> None:
        if key not in self.objects:
            bisect.insort(self.keys, key)
        self.objects[key] = data
        self.last_version += 1
        self.versions[key] = self.last_version

    def create(self, key: str, data: bytes) -> None:
        if self.exclusive and key in self.objects:
            raise AlreadyExists(f"{key} exists already: choose another name.")
        self.write(key, data)

    def read(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise NotFound(f"{key} does not exist: check the path.") from None

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self.objects.pop(key, None) is not None:
                del self.versions[key]
                del self.keys[bisect.bisect_left(self.keys, key)]

    def below(self, prefix: str) -> list[str]:
        """The keys below a directory; "" is everything."""
        if not prefix:
            return list(self.keys)
        first = bisect.bisect_left(self.keys, f"{prefix}/")
        return self.keys[first : bisect.bisect_left(self.keys, f"{prefix}0", first)]  # "0" comes after "/"


class CarryOut(Protocol):
    """Carries a request out: calls the effect, or not, and returns its answer, or raises a `StorageError`."""

    def __call__(self, verb: str, key: str, effect: Callable[[], _T], data: bytes | None = None) -> _T: ...


def _at_once() -> CarryOut:
    lock = threading.Lock()

    def carry_out(verb: str, key: str, effect: Callable[[], _T], data: bytes | None = None) -> _T:
        with lock:
            return effect()

    return carry_out


class MemoryStore:
    """A view of a bucket, rooted at `prefix`."""

    def __init__(self, bucket: Bucket, carry_out: CarryOut | None = None, prefix: str = "") -> None:
        self._bucket = bucket
        self._carry_out = carry_out or _at_once()
        self._prefix = prefix
        self._below = f"{prefix}/" if prefix else ""

    def __repr__(self) -> str:
        return f"MemoryStore({self.uri!r})"

    @property
    def uri(self) -> str:
        return f"memory://{self._bucket.name}/{self._prefix}"

    @property
    def local_root(self) -> Path | None:
        return None

    @property
    def exclusive(self) -> bool:
        return self._bucket.exclusive

    def put(self, key: str, data: bytes) -> None:
        full = self._full(key)
        self._carry_out("put", full, lambda: self._bucket.write(full, bytes(data)), data)

    def create(self, key: str, data: bytes) -> None:
        full = self._full(key)
        self._carry_out("create", full, lambda: self._bucket.create(full, bytes(data)), data)

    def get(self, key: str) -> bytes:
        full = self._full(key)
        return self._carry_out("get", full, lambda: self._bucket.read(full))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        full = self._full(key)
        return self._carry_out("get", full, lambda: self._bucket.read(full)[start : start + length])

    def size(self, key: str) -> int:
        full = self._full(key)
        return self._carry_out("size", full, lambda: len(self._bucket.read(full)))

    def version(self, key: str) -> str | None:
        full = self._full(key)

        def version() -> str:
            self._bucket.read(full)
            return str(self._bucket.versions[full])

        return self._carry_out("size", full, version)

    def children(self, prefix: str = "") -> list[str]:
        full = self._directory(prefix)
        start = len(full) + 1 if full else 0

        def children() -> list[str]:
            names = (key[start:].partition("/") for key in self._bucket.below(full))
            return sorted({name for name, slash, _ in names if slash})

        return self._carry_out("list", full, children)

    def list(self, prefix: str = "") -> list[Entry]:
        full = self._directory(prefix)
        start = len(self._below)

        def entries() -> Any:
            return [Entry(key[start:], len(self._bucket.objects[key])) for key in self._bucket.below(full)]

        return self._carry_out("list", full, entries)

    def delete(self, keys: Iterable[str]) -> None:
        doomed = [self._full(key) for key in keys]
        if doomed:
            self._carry_out("delete", doomed[0], lambda: self._bucket.delete(doomed))

    def copy(self, source: str, target: str) -> None:
        origin, full = self._full(source), self._full(target)
        self._carry_out("copy", full, lambda: self._bucket.write(full, self._bucket.read(origin)))

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        full = self._full(key)
        data = bytes(source.view) if isinstance(source, InMemory) else source.read_bytes()
        _tell(len(data), on_bytes)
        self._carry_out("put", full, lambda: self._bucket.write(full, data), data)
        return Digest(len(data), blake3(data).hexdigest())

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        data = self.get(key)
        partial = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(data)
            _tell(len(data), on_bytes)
            partial.rename(target)
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()
        return Digest(len(data), blake3(data).hexdigest())

    def sub(self, prefix: str) -> Store:
        return MemoryStore(self._bucket, self._carry_out, self._directory(check_key(prefix)))

    def close(self) -> None:
        """Nothing is held."""

    def _full(self, key: str) -> str:
        return self._below + check_key(key)

    def _directory(self, prefix: str) -> str:
        return self._below + check_prefix(prefix) if prefix else self._prefix


def _tell(size_bytes: int, on_bytes: OnBytes | None) -> None:
    if on_bytes is not None:
        for start in range(0, size_bytes, _BLOCK_BYTES):
            on_bytes(min(_BLOCK_BYTES, size_bytes - start))

"""The Store protocol: operations on bytes, and what each of them guarantees.

One package per backend (`posix`, `objects`, `arrow`) implements it; `retry` wraps any of them; `tests/contract` holds
every one of them to the obligations below. Nothing here knows what a checkpoint is: that is `holdfast.checkpoint`.

Keys are relative, `/`-separated, never empty, without `.` or `..` parts; a key and `key/...` never coexist.
All calls block and may be made from several threads at once. All raise `holdfast.errors.StorageError` subclasses,
and nothing else, for what the storage did; no message ever holds a credential.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Digest", "Entry", "InMemory", "Incoming", "OnBytes", "Source", "Store"]

OnBytes = Callable[[int], None]
"""Called with each block's size as it is transferred, for progress; may raise to cancel the transfer."""


class Entry(NamedTuple):
    """One stored object: its key, relative to the store's root, and its size."""

    key: str
    size_bytes: int


class Digest(NamedTuple):
    """Size and BLAKE3 hash (256 bits, lower-case hexadecimal) of the bytes that were transferred."""

    size_bytes: int
    blake3: str


class InMemory(NamedTuple):
    """Bytes in memory to be stored. Nobody changes them before the upload is over."""

    view: memoryview
    digest: Digest | None = None
    """Their digest, if it is known already: they are then not hashed again."""


Source = Path | InMemory
"""The source of an upload."""


class Incoming(NamedTuple):
    """Bytes that come from another process while they are stored (`holdfast.streaming`). They can be read once."""

    readinto: Callable[[memoryview], int]
    """Fills the beginning of this memory, and says how much of it; 0 at the end."""
    size_bytes: int
    """What was announced; more or less may come."""
    mode: int
    """The permissions of the sender's file."""


@runtime_checkable
class Store(Protocol):
    """Somewhere to keep bytes."""

    @property
    def uri(self) -> str:
        """The root, as a person would write it, without credentials; `open_store(uri)` finds it again if possible."""
        ...

    @property
    def local_root(self) -> Path | None:
        """The directory in which keys are plain files, or None where they are not."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether `create` really refuses a second creation. Probed against the storage itself, once, on first use:
        some servers ignore the condition and answer success."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Store `data`, replacing what was there. Readers see the old or the new bytes, never a mixture or a part;
        when this returns, the bytes survive a crash of this machine."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Like `put`, but raises `AlreadyExists` if the key is there. Of any number of concurrent creations exactly
        one succeeds, where `exclusive`. An unknown outcome (a lost answer) is resolved by reading back."""
        ...

    def get(self, key: str) -> bytes:
        """The bytes last put; `NotFound` if the key is not there. Sees every earlier put, from any process."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`; fewer only where the object ends."""
        ...

    def size(self, key: str) -> int:
        """The object's size in bytes; `NotFound` if the key is not there."""
        ...

    def version(self, key: str) -> str | None:
        """An opaque string that changes whenever the bytes under `key` may have changed; None where the storage has no
        such thing, and then nothing may be concluded. `NotFound` if the key is not there.

        Files: device, inode, size, and times of the last change. It may change without the bytes, as it does when a
        file gets another hard link or loses one. Objects: the ETag."""
        ...

    def children(self, prefix: str = "") -> list[str]:
        """The names of the directories directly below the directory `prefix`, sorted; cheap where `list` is not.
        Empty directories may or may not be named."""
        ...

    def list(self, prefix: str = "") -> list[Entry]:
        """Every object below the directory `prefix` ("" is everything), at any depth, sorted by key. Unfinished
        writes and the store's own temporaries are not listed. An absent prefix gives an empty list."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete these objects; an absent one is no error. Directories left empty vanish too."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Make `target` hold the bytes of `source` without moving them through this process where the storage can
        (reflink, hard link, server-side copy). `NotFound` if `source` is not there. Same atomicity as `put`."""
        ...

    def upload(self, key: str, source: Source, on_bytes: OnBytes | None = None) -> Digest:
        """Store a local file, or memory, of any size; the digest is of the very bytes that were sent. An interrupted
        upload leaves nothing under `key` that a manifest could take for the whole; trying again starts over, never
        mixes."""
        ...

    def download(self, key: str, target: Path, on_bytes: OnBytes | None = None) -> Digest:
        """Write the object to the local file `target` (parents are made), and digest what was written.
        `target` appears whole or not at all."""
        ...

    def sub(self, prefix: str) -> Store:
        """The same storage with its root moved down; shares connections and the probe's answer."""
        ...

    def close(self) -> None:
        """Release connections and threads. Closing twice is fine; views made by `sub` are closed as well."""
        ...

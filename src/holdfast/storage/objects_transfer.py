"""Large objects on their way: what `objects` sends as parts, and fetches as ranges.

A file is read once, for the digest and for the server. A download is one stream, or several ranges at a time where that
is faster: a cloud gives more to many connections, while some servers of one's own hash the whole object for each range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore

from holdfast.storage.hashing import blocks, new_hasher
from holdfast.storage.store import Digest, OnBytes

__all__ = ["Sent", "part_bytes", "put_parts", "ranges"]

_MIB = 1024 * 1024
_PART_BYTES = 8 * _MIB
_MAX_PARTS = 9_000  # S3 takes 10,000
_CONCURRENT_PARTS = 4
_CONCURRENT_RANGES = 8


class Sent(Iterator[Any]):
    """The blocks of a local file on their way out: hashed, counted, and the failure kept that stopped them."""

    def __init__(self, source: Path, block_bytes: int, on_bytes: OnBytes | None) -> None:
        self._hasher = new_hasher()
        self._blocks = blocks(source, self._hasher, on_bytes, block_bytes)
        self._held: Any = None
        self._size_bytes = 0
        self.failure: BaseException | None = None

    def __next__(self) -> Any:
        if self._held is not None:
            held, self._held = self._held, None
            return held
        try:
            block = next(self._blocks)
        except StopIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise
        self._size_bytes += len(block)
        return block

    def after(self, first: Any) -> Sent:
        """This iterator with a block put back before the rest."""
        self._held = first
        return self

    def digest(self) -> Digest:
        return Digest(self._size_bytes, self._hasher.hexdigest())


def part_bytes(size_bytes: int) -> int:
    """The size of parts: whole MiB, and not too many of them."""
    return max(_PART_BYTES, -(-size_bytes // _MAX_PARTS // _MIB) * _MIB)


def put_parts(client: Any, path: str, parts: Iterator[Any], size_bytes: int) -> None:
    """Send an object in parts, several at a time; it appears when the last of them is there."""
    obstore.put(
        client,
        path,
        parts,
        use_multipart=True,
        chunk_size=part_bytes(size_bytes),
        max_concurrency=_CONCURRENT_PARTS,
    )


def ranges(client: Any, path: str, size_bytes: int, tag: str | None) -> Iterator[Any]:
    """The blocks of an object, in order, fetched several at a time. `tag` makes sure that all are of one object."""

    def fetch(start: int) -> Any:
        options: Any = {"range": (start, min(start + _PART_BYTES, size_bytes)), "if_match": tag}
        return obstore.get(client, path, options=options).bytes()

    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(_CONCURRENT_RANGES, thread_name_prefix="holdfast-range") as pool:
        try:
            for start in range(0, size_bytes, _PART_BYTES):
                waiting.append(pool.submit(fetch, start))
                if len(waiting) >= 2 * _CONCURRENT_RANGES:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

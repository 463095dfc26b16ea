"""Multipart uploads and ranged downloads of large objects, for `store`.

A download is one stream, or several ranges at a time where that is faster: clouds serve many connections faster than
one, while some servers hash the whole object for each range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Semaphore
from typing import Any

import obstore

__all__ = ["part_bytes_for", "put_parts", "ranges"]

_MIB = 1024 * 1024
_PART_BYTES = 8 * _MIB
_MAX_PARTS = 9_000  # S3 takes 10,000
_CONCURRENT_PARTS = 4
_CONCURRENT_RANGES = 8


def put_parts(client: Any, path: str, blocks: Iterable[Any], part_bytes: int = _PART_BYTES) -> None:
    """Send an object in parts, several at a time; it appears when the last of them is there.

    The blocks are made in the caller's thread and sent by another: obstore would run the caller's code inside its own
    event loop, where nothing else of obstore's may be called, and no signal is seen.
    """
    parts = _BlockQueue()
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-send") as pool:
        sending = pool.submit(_send, client, path, parts, part_bytes)
        try:
            for block in blocks:
                if not parts.put(block):
                    break
            parts.end()
        except BaseException as error:
            parts.end(error)
            wait([sending])
            raise
        sending.result()


def _send(client: Any, path: str, parts: _BlockQueue, part_bytes: int) -> None:
    try:
        obstore.put(client, path, parts, use_multipart=True, chunk_size=part_bytes, max_concurrency=_CONCURRENT_PARTS)
    finally:
        parts.stop()


class _BlockQueue(Iterator[Any]):
    """Hands blocks from one thread to another, a few at a time."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._free = Semaphore(2)
        self._stopped = False

    def put(self, block: Any) -> bool:
        """Hand a block over, waiting for a free place; False when the receiver has stopped."""
        self._free.acquire()
        self._queue.put(block)
        return not self._stopped

    def end(self, error: BaseException | None = None) -> None:
        """No more blocks; with an error the receiver raises it, so that the upload is cancelled."""
        self._queue.put(StopIteration() if error is None else error)

    def stop(self) -> None:
        """The receiver takes no more blocks: wake a sender that waits."""
        self._stopped = True
        self._free.release()

    def __next__(self) -> Any:
        block = self._queue.get()
        if isinstance(block, BaseException):
            raise block
        self._free.release()
        return block


def ranges(client: Any, path: str, size_bytes: int, tag: str | None) -> Iterator[Any]:
    """The blocks of an object, in order, fetched several at a time. `tag` (ETag) ensures that all are of one
    version."""

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


def part_bytes_for(size_bytes: int) -> int:
    """The part size: whole MiB, and at most as many parts as S3 accepts."""
    return max(_PART_BYTES, -(-size_bytes // _MAX_PARTS // _MIB) * _MIB)

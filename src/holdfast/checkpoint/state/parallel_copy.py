"""Copy large blocks of memory with several threads that do not wait for each other.

torch and numpy copy too, but numpy with one core, and torch with equal shares that end at a barrier: on a machine that
is busy training, all then wait for the slowest core. Here each thread takes the next piece when it is done with one.
Pieces are large on purpose: memcpy writes past the processor's caches from some size on (20 MiB on the machines we
measured), which is twice as fast and leaves the caches to training. The threads live for one call, so that a process
that forks later has none of ours.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

__all__ = ["LARGE_BYTES", "move", "spread"]

_T = TypeVar("_T")

LARGE_BYTES = 1024 * 1024
"""The smallest block that is copied by several threads."""
_PIECE_BYTES = 32 * 1024 * 1024
"""No block is cut into smaller pieces than this."""
_THREADS_MAX = 4
"""More threads do not make memory faster."""

_Block = tuple[int, int, int]
"""Address to copy to, address to copy from, and how many bytes."""


def move(blocks: Iterable[_Block]) -> None:
    """Copy each block. Nobody may free either side before this returns."""
    pieces = sorted(_pieces(blocks), key=lambda piece: -piece[2])  # so that no thread ends with a large one, alone
    spread(lambda piece: ctypes.memmove(*piece), pieces)  # without the interpreter's lock


def spread(work: Callable[[_T], object], pieces: Sequence[_T]) -> None:
    """Do `work` on each piece, with several cores. The first error is raised, when all threads have stopped."""
    left = iter(pieces)
    lock = threading.Lock()
    errors: list[Exception] = []

    def work_off() -> None:
        while not errors:
            with lock:
                piece = next(left, None)
            if piece is None:
                return
            try:
                work(piece)
            except Exception as error:  # noqa: BLE001  raised again by the caller's thread
                errors.append(error)

    count = min(_THREADS_MAX, len(os.sched_getaffinity(0)), len(pieces))
    threads = [threading.Thread(target=work_off, name="holdfast-copy") for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    work_off()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _pieces(blocks: Iterable[_Block]) -> Iterator[_Block]:
    for target, source, size_bytes in blocks:
        step = max(1, -(-size_bytes // max(1, size_bytes // _PIECE_BYTES)))
        for start in range(0, size_bytes, step):
            yield target + start, source + start, min(step, size_bytes - start)

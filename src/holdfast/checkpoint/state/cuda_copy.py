"""Copy tensors from a CUDA device into memory that is not pinned.

Through two pinned chunks on a stream of our own: while one fills, the other is emptied into its place, and the
training stream waits for nothing. Called by `tensors`, which knows the places.

Written against the documented behaviour of torch's streams and events; it has not been run on a device yet.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["copy_from_device"]

_CHUNK_BYTES = 64 * 2**20
_staging: dict[Any, tuple[Any, list[Any]]] = {}
"""For each device its stream and its two pinned chunks: pinning costs milliseconds, so they are kept."""


def copy_from_device(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Copy each (target in ordinary memory, source on a device); all copies are complete when this returns."""
    by_device: dict[Any, list[tuple[Any, Any]]] = {}
    for target, source in pairs:
        if source.is_cuda and source.is_contiguous() and not source.is_conj() and not source.is_neg():
            by_device.setdefault(source.device, []).append((target, source))
        else:
            target.copy_(source)  # torch makes it contiguous on its way.
    for device, its in by_device.items():
        _copy_through_pinned(device, its)


def _copy_through_pinned(device: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
    torch = sys.modules["torch"]
    if device not in _staging:
        chunks = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        _staging[device] = (torch.cuda.Stream(device), chunks)
    stream, chunks = _staging[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    filling: list[tuple[Any, Any, Any] | None] = [None, None]
    turn = 0
    for target, source in pairs:
        step = _CHUNK_BYTES // source.itemsize
        for to, origin in zip(target.view(-1).split(step), source.view(-1).split(step), strict=True):
            _empty(filling[turn])
            chunk = chunks[turn][: origin.numel() * origin.itemsize].view(origin.dtype)
            with torch.cuda.stream(stream):
                chunk.copy_(origin, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record(stream)
            filling[turn] = (arrived, to, chunk)
            turn = 1 - turn
    _empty(filling[turn])
    _empty(filling[1 - turn])


def _empty(filled: tuple[Any, Any, Any] | None) -> None:
    """Copy a chunk to its target, once the device has filled it."""
    if filled is not None:
        arrived, target, chunk = filled
        arrived.synchronize()
        target.copy_(chunk)

"""Memory to write from past the page cache, in large pages.

A disk gets in one request what lies together in memory. Ordinary pages lie scattered: then a request is a MiB at most,
and each ends with an interrupt on the core that the disk is bound to, which may be one that trains. With the disk that
we measured, a GiB written from ordinary pages took an eighth of a second from a training loop on that core, and a
fiftieth from large ones. So `transfer` writes from the rooms that are lent out here, and a copy into them, by threads
that give way to training, pays. Where the kernel has no large pages they are ordinary memory.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["ROOM_BYTES", "fill", "lent"]

ROOM_BYTES = 2 * 1024 * 1024
"""One large page: twice that did not make the disk faster, and half of it did make it slower."""
_SPARE_MAX = 8
"""Kept for the next file: the kernel takes a while to hand out a room."""

_spare: list[memoryview] = []
"""Taken from and added to without a lock: a process that is forked meanwhile would inherit it locked."""


class _PyBuffer(ctypes.Structure):
    """The interpreter's own view of an object's memory: ctypes gives no address of what is read-only."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.py_object),
        ("size_bytes", ctypes.c_ssize_t),
        ("item_bytes", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@contextmanager
def lent(count: int) -> Iterator[list[memoryview]]:
    """So many rooms of ROOM_BYTES each, with anything in them."""
    rooms = [_take() for _ in range(count)]
    try:
        yield rooms
    finally:
        for room in rooms:
            if len(_spare) < _SPARE_MAX:
                _spare.append(room)


def fill(room: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the start of `room`. Other threads run meanwhile, which an assignment would not let
    them."""
    if source.nbytes > room.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit into {room.nbytes}.")
    ctypes.memmove(_address(room), _address(source), source.nbytes)


def _take() -> memoryview:
    with suppress(IndexError):
        return _spare.pop()
    memory = mmap.mmap(-1, 2 * ROOM_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    start = -_address(view) % ROOM_BYTES
    return view[start : start + ROOM_BYTES]


def _address(view: memoryview) -> int:
    """Good for as long as the view is there."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return buffer.address or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))

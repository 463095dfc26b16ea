"""Buffers in huge pages, for writes that bypass the page cache.

One disk request covers memory that is physically contiguous. Ordinary pages are scattered, so a request is a MiB at
most, and each ends with an interrupt on the core that the disk is bound to, which may be one that trains. On the disk
that we measured, a GiB written from ordinary pages cost a training loop on that core an eighth of a second, and a
fiftieth from huge pages. So `transfer` writes from these buffers, and the additional copy into them, by threads of low
priority, pays. Where the kernel has no huge pages the buffers are ordinary memory.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["BUFFER_BYTES", "borrow_buffers", "fill"]

BUFFER_BYTES = 2 * 1024 * 1024
"""One huge page. Twice as much did not make the disk faster; half of it made it slower."""
_SPARE_MAX = 8
"""Buffers that are kept for the next file: the kernel takes a while to allocate a huge page."""

_spare: list[memoryview] = []
"""Used without a lock, which a process that is forked meanwhile would inherit locked."""


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
def borrow_buffers(count: int) -> Iterator[list[memoryview]]:
    """Borrow `count` uninitialised buffers of `BUFFER_BYTES` each."""
    buffers = [_allocate() for _ in range(count)]
    try:
        yield buffers
    finally:
        for buffer in buffers:
            if len(_spare) < _SPARE_MAX:
                _spare.append(buffer)


def fill(buffer: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the start of `buffer`, without the GIL, which an assignment of slices would hold."""
    if source.nbytes > buffer.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit into {buffer.nbytes}.")
    ctypes.memmove(_address(buffer), _address(source), source.nbytes)


def _allocate() -> memoryview:
    with suppress(IndexError):
        return _spare.pop()
    memory = mmap.mmap(-1, 2 * BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    start = -_address(view) % BUFFER_BYTES
    return view[start : start + BUFFER_BYTES]


def _address(view: memoryview) -> int:
    """The address of the view's memory; valid as long as the view exists."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return buffer.address or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
